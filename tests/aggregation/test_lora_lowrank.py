"""Factors put in order, cut, stacked and compacted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_geo.aggregation.lora import Pair, combine, compact, svd_order, truncate
from flower_geo.errors import FactorError


def pair(rank: int, *, seed: int = 0, out: int = 40, inside: int = 30) -> Pair:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(out, rank, generator=generator),
        torch.randn(rank, inside, generator=generator),
    )


def test_order_keeps_the_product_and_sorts_it() -> None:
    b, a = pair(8)
    ordered_b, ordered_a = svd_order(b, a)
    assert ordered_b.shape == b.shape
    torch.testing.assert_close(ordered_b @ ordered_a, b @ a, rtol=1e-4, atol=1e-4)
    values = torch.linalg.svdvals(b @ a)[:8]
    torch.testing.assert_close(ordered_b.norm(dim=0), values, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ordered_a @ ordered_a.T, torch.eye(8), rtol=0, atol=1e-5)
    again_b, again_a = svd_order(ordered_b, ordered_a)
    torch.testing.assert_close(again_b, ordered_b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again_a, ordered_a, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_truncate_is_the_best_of_its_rank_and_nested(rank: int) -> None:
    b, a = pair(8)
    cut_b, cut_a = truncate(b, a, rank)
    u, s, vh = torch.linalg.svd(b.double() @ a.double())
    best = u[:, :rank] * s[:rank] @ vh[:rank]
    torch.testing.assert_close((cut_b @ cut_a).double(), best, rtol=1e-4, atol=1e-4)
    whole_b, whole_a = svd_order(b, a)
    torch.testing.assert_close(whole_b[:, :rank], cut_b)
    torch.testing.assert_close(whole_a[:rank], cut_a)


def test_a_site_of_larger_rank_gets_zero_columns() -> None:
    b, a = pair(4)
    wide_b, wide_a = truncate(b, a, 16)
    assert wide_b.shape == (40, 16)
    assert not wide_b[:, 4:].any()
    torch.testing.assert_close(wide_b @ wide_a, b @ a, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(wide_a @ wide_a.T, torch.eye(16), rtol=0, atol=1e-5)


def test_factors_with_zero_rows_stay_finite() -> None:
    b, a = pair(6)
    b[:, 3:], a[3:] = 0, 0
    ordered_b, ordered_a = svd_order(b, a)
    assert not ordered_b[:, 3:].any()
    torch.testing.assert_close(ordered_a @ ordered_a.T, torch.eye(6), rtol=0, atol=1e-5)
    torch.testing.assert_close(ordered_b @ ordered_a, b @ a, rtol=1e-4, atol=1e-4)


def test_combine_adds_products() -> None:
    pairs = [pair(4, seed=1), pair(8, seed=2), pair(1, seed=3)]
    b, a = combine(pairs)
    assert b.shape == (40, 13)
    total = sum((x @ y for x, y in pairs), torch.zeros(40, 30))
    torch.testing.assert_close(b @ a, total, rtol=1e-4, atol=1e-4)


def test_compact_finds_the_rank() -> None:
    b, a = pair(5)
    wide = combine([(b, a), (b, a), (-b, a)])
    small_b, small_a = compact(*wide)
    assert small_b.shape == (40, 5)
    torch.testing.assert_close(small_b @ small_a, b @ a, rtol=1e-4, atol=1e-4)
    cut_b, _ = compact(*wide, rank=3)
    torch.testing.assert_close(cut_b, small_b[:, :3])
    assert compact(*wide, rank=50)[0].shape == (40, 5)


def test_compact_of_nothing_is_one_column_of_zeros() -> None:
    b, a = pair(5)
    small_b, small_a = compact(*combine([(b, a), (-b, a)]))
    assert small_b.shape == (40, 1)
    assert not small_b.any()
    assert bool(torch.isfinite(small_a).all())


def test_folds_of_many_rounds_stay_small() -> None:
    # Rounds that move within the same few directions: the sum's rank stays theirs.
    total_b, total_a = pair(4)
    exact = total_b.double() @ total_a.double()
    for turn in range(6):
        turned = torch.randn(4, 4, generator=torch.Generator().manual_seed(turn))
        step = total_b[:, :4] @ turned[: total_b.shape[1]], pair(4)[1]
        exact = exact + step[0].double() @ step[1].double()
        total_b, total_a = compact(*combine([(total_b, total_a), step]), rank=4)
    assert total_b.shape == (40, 4)
    assert float(((total_b @ total_a).double() - exact).norm() / exact.norm()) < 1e-5


@pytest.mark.parametrize("name", ["truncate", "svd_order", "compact", "combine"])
def test_bad_factors_are_refused(name: str) -> None:
    def call(b: torch.Tensor, a: torch.Tensor) -> Pair:
        if name == "truncate":
            return truncate(b, a, 2)
        if name == "combine":
            return combine([(b, a)])
        return svd_order(b, a) if name == "svd_order" else compact(b, a)

    b, a = pair(4)
    with pytest.raises(FactorError, match="both must be the rank"):
        call(b[:, :3], a)
    with pytest.raises(FactorError, match="B holds NaN"):
        call(b * math.nan, a)
    with pytest.raises(FactorError, match="A has shape"):
        call(b, a[0])


def test_bad_arguments_are_refused() -> None:
    b, a = pair(4)
    with pytest.raises(FactorError, match="rank is 0"):
        truncate(b, a, 0)
    with pytest.raises(FactorError, match="rank is -1"):
        compact(b, a, -1)
    with pytest.raises(FactorError, match="no factors"):
        combine([])
    with pytest.raises(FactorError, match="different matrices"):
        combine([(b, a), (b[:5], a)])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 10), st.integers(1, 10), st.integers(1, 12), st.integers(1, 16),
    st.integers(0, 2**31), st.sampled_from([0.0, 1e-12, 1.0, 1e8]),
)  # fmt: skip
def test_any_shape(out: int, inside: int, own: int, rank: int, seed: int, size: float) -> None:
    b, a = pair(own, seed=seed, out=out, inside=inside)
    b *= size
    exact = b.double() @ a.double()
    cut_b, cut_a = truncate(b, a, rank)
    assert cut_b.shape == (out, rank)
    assert cut_a.shape == (rank, inside)
    off = float((cut_b.double() @ cut_a.double() - exact).norm())
    tail = float(torch.linalg.svdvals(exact)[rank:].norm())
    assert off == pytest.approx(tail, rel=1e-4, abs=1e-5 * float(b.norm() * a.norm()))
    alive = min(rank, inside)
    torch.testing.assert_close(cut_a[:alive] @ cut_a[:alive].T, torch.eye(alive), rtol=0, atol=1e-5)
