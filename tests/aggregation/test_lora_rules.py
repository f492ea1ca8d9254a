"""Rules of LoRA aggregation against the dense mean of the sites' updates."""

from __future__ import annotations

import math

import pytest
import torch

from flower_geo.aggregation.lora import RULES, aggregate
from flower_geo.errors import FactorError
from tests.aggregation.adapters import EXACT, MIXED, away, mean_update, site, sites

# ------------------------------------------------------------------ one site, equal sites


@pytest.mark.parametrize("rule", RULES)
def test_one_site_is_local_training(rule: str) -> None:
    b, a, scale = site(8)
    made = aggregate(rule, [(b, a, scale)], [17])
    assert away(made.dense(), scale * b.double() @ a.double()) < 1e-6
    assert made.error == 0.0
    assert made.scale == scale
    assert made.extra is None
    assert made.A.dtype == made.B.dtype == torch.float32
    if rule != "svd":  # which puts the columns in order
        assert torch.equal(made.A, a)
        assert torch.equal(made.B, b)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("weights", [[1, 1], [3, 7], [1, 1e-12]])
def test_two_sites_with_the_same_factors_equal_one(rule: str, weights: list[float]) -> None:
    b, a, scale = site(8)
    made = aggregate(rule, [(b, a, scale), (b.clone(), a.clone(), scale)], weights)
    assert away(made.dense(), scale * b.double() @ a.double()) < 1e-6
    assert made.error == 0.0
    assert made.extra is None
    if rule in ("avg", "ffa", "residual", "alternate"):
        assert torch.equal(made.A, a)
        assert torch.equal(made.B, b)


@pytest.mark.parametrize("rule", ["stack", "residual", "svd"])
def test_a_rotated_copy_is_the_same_update(rule: str) -> None:
    b, a, scale = site(8)
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(5)))
    made = aggregate(rule, [(b, a, scale), (b @ turn, turn.T @ a, scale)], [1, 1])
    assert away(made.dense(), scale * b.double() @ a.double()) < 1e-5


def test_avg_of_a_rotated_copy_is_off_and_says_so() -> None:
    b, a, scale = site(8)
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(5)))
    made = aggregate("avg", [(b, a, scale), (b @ turn, turn.T @ a, scale)], [1, 1])
    assert made.error > 0.3
    assert made.error == pytest.approx(away(made.dense(), scale * b.double() @ a.double()), 1e-5)


# ------------------------------------------------------------------------- exact rules


@pytest.mark.parametrize(
    ("rule", "rank"),
    [("stack", None), *(("residual", rank) for rank in (None, 6, 8, 40))],
)
@pytest.mark.parametrize("ranks", [(8, 8, 8, 8), MIXED])
def test_merged_is_the_base_and_the_mean_update(
    rule: str, rank: int | None, ranks: tuple[int, ...]
) -> None:
    factors, weights = sites(ranks), [1.0, 5.0, 2.0, 3.0]
    base = torch.randn(60, 50, generator=torch.Generator().manual_seed(9))
    exact = base.double() + mean_update(factors, weights)
    made = aggregate(rule, factors, weights, rank)
    assert away(base + made.dense(), exact) < 1e-6
    assert away(made.dense(), mean_update(factors, weights)) < 1e-6
    b, a = made.at_scale_one()
    assert away(b @ a, mean_update(factors, weights)) < 1e-5
    assert made.error == 0.0


def test_stack_weighs_one_side_only() -> None:
    factors = sites((4, 4))
    made = aggregate("stack", factors, [9, 1])
    exact = mean_update(factors, [9, 1])
    assert away(made.dense(), exact) < 1e-6
    assert torch.equal(made.A, torch.cat([a for _, a, _ in factors]))
    squared = 2.0 * (0.81 * factors[0][0] @ factors[0][1] + 0.01 * factors[1][0] @ factors[1][1])
    assert away(squared, exact) > 0.05  # what weighing both sides would give


def test_mixed_ranks_stack_to_their_sum() -> None:
    made = aggregate("stack", sites((4, 8, 16)), [1, 1, 1])
    assert made.rank == 28
    assert made.B.shape == (60, 28)


def test_residual_keeps_the_averages_and_a_small_rest() -> None:
    factors = [site(8, seed=i, out=200, inside=150) for i in range(4)]
    plain = aggregate("avg", factors, [1, 2, 3, 4])
    made = aggregate("residual", factors, [1, 2, 3, 4])
    assert torch.equal(made.A, plain.A)
    assert torch.equal(made.B, plain.B)
    assert made.extra is not None
    b, a = made.extra
    assert b.shape == (200, 24)  # (K - 1) r
    assert a.shape == (24, 150)
    exact = mean_update(factors, [1, 2, 3, 4])
    rest = exact - 2.0 * plain.B.double() @ plain.A.double()
    assert float((b @ a - rest).norm()) < 1e-6 * float(exact.norm())


@pytest.mark.parametrize("extra_rank", [1, 5, 24, 99])
def test_a_cut_residual_is_off_by_the_tail(extra_rank: int) -> None:
    factors, weights = [site(8, seed=i) for i in range(4)], [1, 2, 3, 4]
    made = aggregate("residual", factors, weights, extra_rank=extra_rank)
    exact = mean_update(factors, weights)
    tail = torch.linalg.svdvals(exact - 2.0 * made.B.double() @ made.A.double())[extra_rank:]
    assert made.extra is not None
    assert made.extra[1].shape[0] == min(extra_rank, 24)
    assert made.error == pytest.approx(float(tail.norm() / exact.norm()), abs=1e-7)
    assert away(made.dense(), exact) == pytest.approx(made.error, abs=1e-6)


def test_residual_over_rounds_follows_averaging_of_merged_weights() -> None:
    start = torch.randn(60, 50, generator=torch.Generator().manual_seed(3))
    (b, a, scale), weights = site(4), [1.0, 2.0, 3.0]
    ours, dense = start.clone(), start.double()
    for turn in range(3):
        # Each site goes on from the averages and ends elsewhere.
        factors = []
        for index in range(3):
            db, da, _ = site(4, seed=10 * turn + index + 1)
            factors.append((b + db, a + da, scale))
        merged = dense + mean_update(factors, weights)  # what averaging whole models gives
        made = aggregate("residual", factors, weights)
        assert made.extra is not None
        ours += made.extra[0] @ made.extra[1]
        b, a = made.B, made.A
        assert away(ours + scale * b @ a, merged) < 1e-5
        dense = merged - scale * b.double() @ a.double()


@pytest.mark.parametrize("rule", RULES)
def test_never_dense(rule: str) -> None:
    # A matrix of this size would be 80 GB in fp64.
    frozen = rule in ("ffa", "alternate")
    factors = []
    for seed in range(3):
        _, a, scale = site(2, seed=0 if frozen else seed, out=1, inside=100_000)
        factors.append((site(2, seed=seed, out=100_000, inside=1)[0], a, scale))
    made = aggregate(rule, factors, [1, 2, 3])
    assert made.A.shape[1] == made.B.shape[0] == 100_000
    assert (made.error > 0.01) == (rule in ("avg", "svd"))


# ----------------------------------------------------------------------------------- svd


@pytest.mark.parametrize("ranks", [(8, 8, 8, 8), MIXED, (4, 8, 16)])
@pytest.mark.parametrize("rank", [None, 1, 8, 16])
def test_svd_is_the_dense_one_cut(ranks: tuple[int, ...], rank: int | None) -> None:
    factors, weights = sites(ranks), [float(i + 1) for i in range(len(ranks))]
    exact = mean_update(factors, weights)
    u, s, vh = torch.linalg.svd(exact, full_matrices=False)
    kept = max(ranks) if rank is None else rank
    made = aggregate("svd", factors, weights, rank)
    best = u[:, :kept] * s[:kept] @ vh[:kept]
    assert made.rank == kept
    assert float((made.dense() - best).norm() / exact.norm()) < 1e-5
    assert made.error == pytest.approx(float(s[kept:].norm() / s.norm()), abs=1e-7)
    lengths = 2.0 * made.B.double().norm(dim=0)
    torch.testing.assert_close(lengths, s[:kept], rtol=1e-5, atol=1e-6)
    bounded = aggregate("stack", factors, weights, kept)
    assert torch.equal(bounded.B, made.B)


def test_a_small_site_is_served_by_the_first_rows() -> None:
    factors = sites((4, 8, 16))
    exact = mean_update(factors, [1, 1, 1])
    u, s, vh = torch.linalg.svd(exact)
    made = aggregate("svd", factors, [1, 1, 1], rank=16)
    for rank in (1, 4, 8):
        best = u[:, :rank] * s[:rank] @ vh[:rank]
        assert away(2.0 * made.B[:, :rank] @ made.A[:rank], best) < 1e-5


def test_a_rank_above_the_update_is_filled_up_and_can_be_trained() -> None:
    made = aggregate("svd", sites((4, 4)), [1, 1], rank=20)
    assert away(made.dense(), mean_update(sites((4, 4)), [1, 1])) < 1e-6
    assert not made.B[:, 8:].any()
    # Where B is 0 a row of A must not be, or its gradient stays 0 for ever.
    torch.testing.assert_close(made.A @ made.A.T, torch.eye(20), rtol=0, atol=1e-6)


def test_a_rank_above_the_matrix_is_filled_up_with_zeros() -> None:
    factors = [site(3, out=5, inside=4)]
    made = aggregate("svd", factors, [1], rank=9)
    assert made.A.shape == (9, 4)
    assert away(made.dense(), mean_update(factors, [1])) < 1e-6
    assert not made.A[4:].any()


@pytest.mark.parametrize("rule", RULES)
def test_first_round_of_zeros(rule: str) -> None:
    _, a, _ = site(8)
    factors = [(torch.zeros(60, 8), a, 2.0)] * 3
    made = aggregate(rule, factors, [1, 1, 1])
    assert not made.dense().any()
    assert made.error == 0.0
    assert bool(torch.isfinite(made.A).all())
    assert bool(made.A.any())


def test_svd_of_nothing_at_all_is_zero() -> None:
    made = aggregate("svd", [(torch.zeros(6, 2), torch.zeros(2, 5), 1.0)] * 2, [1, 1], rank=3)
    assert not made.dense().any()
    torch.testing.assert_close(made.A @ made.A.T, torch.eye(3))


def test_signs_are_fixed() -> None:
    b, a, scale = site(8)
    one = aggregate("svd", [(b, a, scale)], [1])
    other = aggregate("svd", [(-b, -a, scale)], [1])
    torch.testing.assert_close(one.B, other.B)
    torch.testing.assert_close(one.A, other.A)
    peaks = one.B.gather(0, one.B.abs().argmax(0, keepdim=True))
    assert bool((peaks > 0).all())


def test_sites_that_share_their_size_out_differently() -> None:
    # B tiny and A large at one site, the other way round at the next
    (b0, a0, s), (b1, a1, _) = sites((4, 8))
    factors = [(b0 * 1e-9, a0 * 1e9, s), (b1 * 1e9, a1 * 1e-9, s)]
    exact = mean_update([(b0, a0, s), (b1, a1, s)], [1, 1])
    for rule, rank in (("stack", None), ("stack", 12), ("svd", 12)):
        made = aggregate(rule, factors, [1, 1], rank)
        assert away(made.dense(), exact) < 1e-6


# -------------------------------------------------------------------------------- scales


@pytest.mark.parametrize("rule", [*EXACT, "svd"])
@pytest.mark.parametrize(
    ("ranks", "scales"),
    [
        ((8, 16), (2.0, 1.0)),  # alpha 16 both
        ((8, 16), (16 / math.sqrt(8), 1.0)),  # rsLoRA at one site
        (MIXED, (4.0, 2.0, 1.0, 0.5)),
    ],
)
def test_scales_that_differ(rule: str, ranks: tuple[int, ...], scales: tuple[float, ...]) -> None:
    factors, weights = sites(ranks, scales), [float(i + 1) for i in range(len(ranks))]
    made = aggregate(rule, factors, weights, rank=sum(ranks))
    assert made.scale == 1.0
    assert away(made.dense(), mean_update(factors, weights)) < 1e-5
    raw = mean_update([(b, a, 1.0) for b, a, _ in factors], weights)
    assert away(raw, mean_update(factors, weights)) > 0.05


def test_avg_is_zero_padding() -> None:
    (b0, a0, _), (b1, a1, _) = factors = sites((4, 8))
    made = aggregate("avg", factors, [1, 3])
    pad = torch.nn.functional.pad
    torch.testing.assert_close(made.A, 0.25 * pad(a0, (0, 0, 0, 4)) + 0.75 * a1)
    torch.testing.assert_close(made.B, 0.25 * pad(b0, (0, 4)) + 0.75 * b1)
    wide = aggregate("avg", factors, [1, 3], rank=12)
    assert torch.equal(wide.A[:8], made.A)
    assert not wide.A[8:].any()


def test_avg_folds_scales_into_b_only() -> None:
    (b0, a0, _), (b1, a1, _) = factors = sites((8, 8), (2.0, 1.0))
    made = aggregate("avg", factors, [1, 3])
    assert made.scale == 1.0
    torch.testing.assert_close(made.A, 0.25 * a0 + 0.75 * a1)
    torch.testing.assert_close(made.B, 0.25 * 2.0 * b0 + 0.75 * b1)


@pytest.mark.parametrize("rank", [None, 3, 20])
def test_avg_measures_its_error(rank: int | None) -> None:
    factors = sites((4, 8, 8, 16), (4.0, 2.0, 2.0, 1.0))
    made = aggregate("avg", factors, [1, 2, 3, 4], rank)
    exact = mean_update(factors, [1, 2, 3, 4])
    assert made.error > 0.1
    assert made.error == pytest.approx(away(made.dense(), exact), rel=1e-5)


# --------------------------------------------------------------------- ffa and alternate


@pytest.mark.parametrize("ranks", [(8, 8, 8), (2, 8, 5)])
@pytest.mark.parametrize("scales", [(2.0, 2.0, 2.0), (2.0, 1.0, 0.7)])
@pytest.mark.parametrize("rule", ["ffa", "alternate"])
def test_one_a_for_all_is_exact(
    rule: str, ranks: tuple[int, ...], scales: tuple[float, ...]
) -> None:
    _, a, _ = site(8)
    factors = [(b, a[: b.shape[1]], s) for b, _, s in sites(ranks, scales)]
    made = aggregate(rule, factors, [1, 2, 3])
    assert torch.equal(made.A, a)
    assert away(made.dense(), mean_update(factors, [1, 2, 3])) < 1e-6
    assert made.error == 0.0
    wide = aggregate(rule, factors, [1, 2, 3], rank=10)
    assert wide.A.shape == (10, 50)
    assert torch.equal(wide.dense(), made.dense())


@pytest.mark.parametrize("ranks", [(8, 8, 8), (2, 8, 5)])
@pytest.mark.parametrize("scales", [(2.0, 2.0, 2.0), (2.0, 1.0, 0.7)])
def test_alternate_averages_a_over_one_b(ranks: tuple[int, ...], scales: tuple[float, ...]) -> None:
    b, _, _ = site(8)
    factors = [(b[:, : a.shape[0]], a, s) for _, a, s in sites(ranks, scales)]
    made = aggregate("alternate", factors, [1, 2, 3])
    assert torch.equal(made.B, b)
    assert made.B.is_contiguous()
    assert away(made.dense(), mean_update(factors, [1, 2, 3])) < 1e-6


def test_ffa_names_the_site_with_another_a() -> None:
    _, a, _ = site(8)
    factors = [(b, a.clone(), s) for b, _, s in sites((8, 8, 8))]
    factors[0][1][3, 3] += 1e-6
    with pytest.raises(FactorError, match=r"^site north: its A differs") as caught:
        aggregate("ffa", factors, [1, 1, 1], names=["north", "south", "west"])
    assert caught.value.site == 0


def test_ffa_of_a_zero_a_is_refused() -> None:
    b, a, s = site(8)
    with pytest.raises(FactorError, match="A is all zero"):
        aggregate("ffa", [(b, torch.zeros_like(a), s)] * 2, [1, 1])


def test_alternate_names_the_site_that_trained_both() -> None:
    _, a, _ = site(8)
    factors = [(b, a, s) for b, _, s in sites((8, 8, 8))]
    factors[1] = site(8, seed=7)
    with pytest.raises(FactorError, match="site 1: both its A and its B") as caught:
        aggregate("alternate", factors, [1, 1, 1])
    assert caught.value.site == 1


@pytest.mark.parametrize("rule", ["ffa", "alternate"])
def test_a_frozen_side_is_not_cut(rule: str) -> None:
    with pytest.raises(FactorError, match="cannot cut a rank"):
        aggregate(rule, [site(8)], [1], rank=4)
