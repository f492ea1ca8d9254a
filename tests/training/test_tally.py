from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

from flower_geo.training.tally import DeviceTally, HostTally, RoundSoFar, Tally

CPU = torch.device("cpu")


def tallies() -> list[Tally]:
    return [HostTally(), DeviceTally(CPU)]


def fill(tally: Tally, losses: list[float], norms: list[float]) -> Tally:
    for step, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        tally.add(torch.tensor(loss), torch.tensor(norm), tokens=10, step=step)
    return tally


def test_both_count_the_same() -> None:
    host, device = (fill(t, [3.0, 2.0, 1.5], [1.0, 4.0, 1.0]).result(2.0) for t in tallies())
    assert host == device
    assert (host.steps, host.tokens, host.seconds) == (3, 30, 2.0)
    assert (host.loss_first, host.loss_last) == (3.0, 1.5)
    assert host.loss_mean == pytest.approx(6.5 / 3)
    assert host.grad_norm == 2.0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_the_first_bad_step_sticks(bad: float, where: str) -> None:
    good, ill = [1.0] * 4, [1.0, bad, 1.0, math.nan]
    losses, norms = (ill, good) if where == "loss" else (good, ill)
    for tally in tallies():
        fill(tally, losses, norms)
        found = tally.first_bad()
        assert found is not None and found[0] == 1
        assert str(found[1]) == str(losses[1])
        if isinstance(tally, DeviceTally):
            assert tally.bad() == 1.0


def test_good_steps_are_not_bad() -> None:
    for tally in tallies():
        assert fill(tally, [1.0], [0.0]).first_bad() is None
    assert DeviceTally(CPU).bad() == 0.0


def test_a_count_that_goes_on_is_that_of_one_go() -> None:
    losses, norms = [3.0, 2.1, 1.7, 0.3], [0.1, 0.7, 0.2, 0.9]
    kinds: list[Any] = [HostTally, partial(DeviceTally, CPU)]
    for kind in kinds:
        reference = fill(kind(), losses, norms).result(4.0)
        kept = asdict(fill(kind(), losses[:3], norms[:3]).so_far(3.0))
        carried = RoundSoFar(**json.loads(json.dumps(kept)))
        assert (carried.steps, carried.tokens, carried.seconds) == (3, 30, 3.0)
        assert fill(kind(carried), losses[3:], norms[3:]).result(4.0) == reference
