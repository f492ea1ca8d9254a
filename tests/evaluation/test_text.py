from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from flower_geo.errors import DataError
from flower_geo.evaluation.text import _spread
from flower_geo.training import EvalResult, evaluate
from tests.training.conftest import VOCAB, small, with_dropout


def rows(count: int, length: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("spec", ["gpt2-nano", "llama-nano"])
def test_loss_is_the_models_own(spec: str) -> None:
    model, split = small(spec), rows(6)
    result = evaluate(model, split, batch_size=6)
    batch = torch.stack(split)
    with torch.no_grad():
        wanted = model(input_ids=batch, labels=batch).loss
    assert result.tokens == 6 * 7
    assert result.loss == pytest.approx(float(wanted), rel=1e-6)


def test_loss_does_not_depend_on_the_batch_size() -> None:
    model, split = small(), rows(7)
    results = [evaluate(model, split, batch_size=size) for size in (1, 3, 7, 100)]
    assert {r.tokens for r in results} == {49}
    for result in results:
        assert result.loss == pytest.approx(results[0].loss, rel=1e-6)


@pytest.mark.parametrize("mode", [True, False])
def test_nothing_of_the_model_changes(mode: bool) -> None:
    model = with_dropout().train(mode)
    state = torch.get_rng_state()
    first = evaluate(model, rows(3), 2)
    assert evaluate(model, rows(3), 2) == first  # without dropout
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training is mode
    assert all(p.grad is None for p in model.parameters())


def test_mode_comes_back_after_an_error() -> None:
    model = small()
    with pytest.raises(IndexError):
        evaluate(model, [torch.full((8,), VOCAB + 5)], 1)
    assert model.training


def test_a_part_is_spread_over_the_split() -> None:
    seen: list[int] = []

    class Watched(list[Tensor]):
        def __getitem__(self, index: Any) -> Any:
            seen.append(index)
            return super().__getitem__(index)

    result = evaluate(small(), Watched(rows(10)), 2, max_tokens=5 * 7)
    assert result.tokens == 35
    assert sorted(set(seen)) == [0, 2, 4, 6, 8]


@given(st.integers(1, 500), st.integers(1, 64), st.one_of(st.none(), st.integers(1, 5000)))
def test_spread_never_repeats(available: int, predictions: int, most: int | None) -> None:
    chosen = _spread(available, predictions, most)
    assert len(set(chosen)) == len(chosen) >= 1
    assert chosen == sorted(chosen) and 0 <= chosen[0] and chosen[-1] < available
    if most is None or most >= available * predictions:
        assert chosen == list(range(available))
    else:
        assert len(chosen) * predictions <= max(most, predictions)


def test_results_add_up_by_token() -> None:
    total = EvalResult(30.0, 10) + EvalResult(10.0, 10)
    assert total == EvalResult(40.0, 20) and total.loss == 2.0
    assert math.isnan(EvalResult(0.0, 0).loss)


def test_bf16_is_close_to_fp32() -> None:
    exact = evaluate(small(), rows(4), 4).loss
    rough = evaluate(small(), rows(4), 4, precision="bf16").loss
    assert rough != exact and rough == pytest.approx(exact, rel=2e-2)


@pytest.mark.parametrize("split", [[], rows(2, length=1)])
def test_nothing_to_predict_is_refused(split: list[Tensor]) -> None:
    with pytest.raises(DataError, match="no held-out text"):
        evaluate(small(), split, 2)
