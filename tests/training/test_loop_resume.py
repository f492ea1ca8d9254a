"""A round that is broken off and gone on with counts and computes what one go does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.errors import TrainingError
from flower_geo.training import InnerConfig, InnerLoop
from tests.training.conftest import batches, equal, small, weights, with_dropout


def test_a_round_broken_off_and_gone_on_with_is_one_round() -> None:
    whole = with_dropout()
    torch.manual_seed(5)
    reference = InnerLoop(whole, InnerConfig(lr=0.01)).run(batches(), steps=6, position=2, span=3)

    torch.manual_seed(5)
    model = with_dropout()
    taken: dict[str, Any] = {}
    loop = InnerLoop(model, InnerConfig(lr=0.01))

    def take(step: int, _: Tensor) -> None:
        if step == 4:
            taken.update(state=loop.state_dict(), weights=weights(model), so_far=loop.so_far())

    loop.run(batches(), steps=6, position=2, span=3, on_step=take)
    torch.manual_seed(99)
    resumed = with_dropout(0.2)
    with torch.no_grad():
        for name, parameter in resumed.named_parameters():
            parameter.copy_(taken["weights"][name])
    again = InnerLoop(resumed, InnerConfig(lr=0.01))
    again.load_state_dict(taken["state"])
    source = batches()
    for _ in range(4):
        source()
    result = again.run(source, steps=6, position=2, span=3, carried=taken["so_far"])
    assert equal(weights(resumed), weights(whole))
    assert replace(result, seconds=0.0) == replace(reference, seconds=0.0)
    assert result.seconds > taken["so_far"].seconds > 0
    # Broken off after the last step, or after the last second: nothing is left to do.
    done = replace(taken["so_far"], steps=6)
    assert again.run(source, steps=6, carried=done).loss_mean == done.losses / 6
    assert again.run(source, None, seconds=1e-9, carried=done).seconds == done.seconds
    assert equal(weights(resumed), weights(whole))


def test_how_far_a_round_is_can_be_asked_within_it_only() -> None:
    with pytest.raises(TrainingError, match="no round is under way"):
        InnerLoop(small(), InnerConfig()).so_far()
