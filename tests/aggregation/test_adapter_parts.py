"""What of an adapter a round trains and sends, and what a site of lower rank has of it."""

from __future__ import annotations

import pytest
import torch

from flower_geo.aggregation.adapter_parts import (
    fold_names,
    folds_in,
    is_fold,
    module_of,
    modules_in,
    ranks_of,
    sent,
    sliced,
    trained,
)
from flower_geo.errors import RoundError

Q, V = "base_model.model.layers.0.q_proj", "base_model.model.layers.0.v_proj"
A, B, HEAD = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight", "base_model.model.score.weight"
STATE = {
    A: torch.arange(32.0).view(4, 8), B: torch.arange(24.0).view(6, 4),
    f"{V}.lora_A.weight": torch.ones(2, 8), f"{V}.lora_B.weight": torch.ones(6, 2),
    HEAD: torch.ones(3, 8),
}  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "round", "a", "b"),
    [
        ("avg", 1, True, True), ("stack", 2, True, True), ("residual", 1, True, True),
        ("svd", 4, True, True), ("ffa", 1, False, True), ("ffa", 2, False, True),
        ("alternate", 1, False, True), ("alternate", 2, True, False),
        ("alternate", 3, False, True),
    ],
)  # fmt: skip
def test_which_side_a_round_trains(rule: str, round: int, a: bool, b: bool) -> None:
    assert (trained(A, rule, round), trained(B, rule, round)) == (a, b)
    assert trained(HEAD, rule, round)
    assert not trained(fold_names(Q, 1)[0], rule, round)


def test_what_is_personal_is_trained_and_stays() -> None:
    assert trained(B, "avg", 1) and not sent(B, "avg", 1, ["*lora_B*"])
    assert sent(A, "avg", 1, ["*lora_B*"]) and sent(B, "avg", 1)


def test_modules_and_names() -> None:
    names = [*STATE, *fold_names(Q, 7)]
    assert modules_in(names) == {
        Q: (A, B), V: (f"{V}.lora_A.weight", f"{V}.lora_B.weight"),
    }  # fmt: skip
    assert module_of(HEAD) == "" and not is_fold(A) and is_fold(fold_names(Q, 7)[1])


def test_folds_sort_by_their_round() -> None:
    state = dict(STATE)
    for round in (11, 2):
        for name in fold_names(Q, round):
            state[name] = torch.full((1, 1), float(round))
    found = folds_in(state)
    assert [found[key][1].item() for key in sorted(found)] == [2.0, 11.0]
    assert {module for module, _, _ in found.values()} == {Q}
    for missing in fold_names(Q, 2):
        with pytest.raises(RoundError, match=r"lora_[AB]"):
            folds_in({name: t for name, t in state.items() if name != missing})


def test_a_lower_rank_has_the_first_rows_and_columns() -> None:
    found = sliced(STATE, {Q: 3})
    assert torch.equal(found[A], STATE[A][:3]) and torch.equal(found[B], STATE[B][:, :3])
    assert found[HEAD] is STATE[HEAD] and found[f"{V}.lora_A.weight"].shape == (2, 8)
    assert all(tensor.is_contiguous() for tensor in found.values())


@pytest.mark.parametrize("rank", [0, 5])
def test_no_site_has_a_higher_rank(rank: int) -> None:
    with pytest.raises(RoundError, match="may be lower, never higher"):
        sliced(STATE, {Q: rank})


def test_ranks_of_shapes() -> None:
    assert ranks_of({name: tuple(tensor.shape) for name, tensor in STATE.items()}) == {Q: 4, V: 2}
    assert ranks_of({B: (6, 3)}) == {Q: 3}
    for shapes in ({A: (4, 8), B: (6, 3)}, {A: (4,)}, {B: (6, 0)}):
        with pytest.raises(RoundError, match="no rank in common"):
            ranks_of(shapes)
