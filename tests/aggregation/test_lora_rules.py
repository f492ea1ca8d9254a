"""Rules of LoRA aggregation against the dense mean of the sites' updates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_geo.aggregation.lora import RULES, SiteFactors, aggregate
from flower_geo.errors import ConfigError, FactorError, RoundError

EXACT = ("stack", "residual")
MIXED = (4, 8, 16, 32)


def site(
    rank: int, scale: float = 2.0, *, seed: int = 0, out: int = 60, inside: int = 50
) -> SiteFactors:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    b = torch.randn(out, rank, generator=generator) * 0.1
    return b, torch.randn(rank, inside, generator=generator) / math.sqrt(inside), scale


def sites(ranks: Sequence[int], scales: Sequence[float] | None = None) -> list[SiteFactors]:
    scales = [2.0] * len(ranks) if scales is None else scales
    pairs = zip(ranks, scales, strict=True)
    return [site(rank, scale, seed=i) for i, (rank, scale) in enumerate(pairs)]


def mean_update(factors: Sequence[SiteFactors], weights: Sequence[float]) -> Tensor:
    """The dense way, in fp64."""
    total = math.fsum(weights)
    parts = [w / total * s * (b.double() @ a.double()) for (b, a, s), w in zip(factors, weights)]  # noqa: B905
    return torch.stack(parts).sum(0)


def away(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


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


# ------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("rule", RULES)
def test_a_site_without_weight_counts_nothing(rule: str) -> None:
    b, a, s = site(8)
    other = site(8, seed=4)
    factors = [(b, a, s), other, (b, a, s)]
    made = aggregate(rule, factors, [2, 0, 2])
    assert away(made.dense(), s * b.double() @ a.double()) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_weights_count_by_ratio_only(rule: str) -> None:
    _, a, _ = site(8)
    factors = [(b, a, s) for b, _, s in sites((8, 8))]
    one = aggregate(rule, factors, [1, 3]).dense()
    for factor in (1e-300, 1e300, 1e-320):
        torch.testing.assert_close(aggregate(rule, factors, [factor, 3 * factor]).dense(), one,
                                   rtol=1e-3 if factor == 1e-320 else 1e-6, atol=1e-6)  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([0, 0], "every site has weight 0"),
        ([1, -1], "weight is -1"),
        ([1, math.nan], "weight is nan"),
        ([1, math.inf], "weight is inf"),
        ([1], "2 sites' factors came with 1 weights"),
    ],
)
def test_weights_that_allow_no_mean(rule: str, weights: list[float], words: str) -> None:
    with pytest.raises(RoundError, match=words) as caught:
        aggregate(rule, [site(8), site(8)], weights)
    assert "\n" not in str(caught.value)


def test_sites_with_other_modules_are_aggregated_by_those_that_have_it() -> None:
    # A module only two of three sites adapt: their weights, divided by their own sum.
    factors = sites((4, 8))
    made = aggregate("stack", factors, [30, 10])
    assert away(made.dense(), mean_update(factors, [3, 1])) < 1e-6


def test_token_weights_are_the_pooled_gradient() -> None:
    # One SGD step of B on a linear layer's squared error over unequal numbers of rows.
    _, a, _ = site(4)
    a = a.double()
    rows = torch.randn(12, 50, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    wanted = torch.randn(12, 60, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def stepped(x: Tensor, y: Tensor) -> Tensor:
        b = torch.zeros(60, 4, dtype=torch.float64, requires_grad=True)
        ((x @ (b @ a).T - y) ** 2).sum(1).mean().backward()  # type: ignore[no-untyped-call]
        assert b.grad is not None
        return -0.1 * b.grad

    parts = [(rows[:3], wanted[:3]), (rows[3:], wanted[3:])]
    factors = [(stepped(x, y), a, 1.0) for x, y in parts]
    made = aggregate("ffa", factors, [3, 9])
    torch.testing.assert_close(made.B.double(), stepped(rows, wanted), rtol=1e-5, atol=1e-7)


# ------------------------------------------------------------------------------ bad input


BAD = {
    "NaN in B": (lambda b, a: (b.index_fill(1, torch.tensor(2), math.nan), a, 2.0), "B holds NaN"),
    "infinity in A": (lambda b, a: (b, a.index_fill(0, torch.tensor(0), math.inf), 2.0),
                      "A holds NaN or infinity"),
    "another module": (lambda b, a: (b[:-1], a, 2.0), "59x50 matrix, other sites' a 60x50 one"),
    "A transposed": (lambda b, a: (b, a.T, 2.0), "B has 8 columns and A has 50 rows"),
    "ranks apart": (lambda b, a: (b[:, :7], a, 2.0), "B has 7 columns and A has 8 rows"),
    "no rank": (lambda b, a: (b[:, :0], a[:0], 2.0), "B has shape"),
    "a vector": (lambda b, a: (b[:, 0], a, 2.0), "B has shape"),
    "integers": (lambda b, a: (b.long(), a, 2.0), "B must be a tensor of floats, not torch.int64"),
    "no tensor": (lambda b, a: (b, a.tolist(), 2.0), "A must be a tensor of floats, not list"),
    "scale zero": (lambda b, a: (b, a, 0.0), "scale is 0.0"),
    "scale NaN": (lambda b, a: (b, a, math.nan), "scale is nan"),
    "no scale": (lambda b, a: (b, a), r"must be \(B, A, scale\)"),
    "a word for scale": (lambda b, a: (b, a, "two"), r"must be \(B, A, scale\)"),
}  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_bad_factors_name_the_site(rule: str, what: str, weight: float) -> None:
    spoil, words = BAD[what]
    factors = [site(8), site(8), site(8)]
    factors[1] = spoil(*factors[1][:2])  # type: ignore[no-untyped-call]
    with pytest.raises(FactorError, match=f"^site lyon: .*{words}") as caught:
        aggregate(rule, factors, [1, weight, 1], names=["bern", "lyon", "turin"])
    assert caught.value.site == 1
    assert "\n" not in str(caught.value)
    del factors[1]
    assert bool(torch.isfinite(aggregate(rule, factors, [1, 1]).dense()).all())


def test_factors_grown_beyond_fp32() -> None:
    b, a, s = site(4)
    huge = (b.double() * 1e41, a, s)
    with pytest.raises(FactorError, match="too large for fp32"):
        aggregate("avg", [huge], [1])
    with pytest.raises(FactorError, match="too large"):
        aggregate("svd", [(b.double() * 1e200, a.double() * 1e200, s)], [1])


def test_arguments_that_mean_nothing() -> None:
    with pytest.raises(ConfigError, match="did you mean 'stack'"):
        aggregate("stak", [site(4)], [1])
    with pytest.raises(RoundError, match="no site has answered"):
        aggregate("avg", [], [])
    for rank in (0, -1, 2.5, True):
        with pytest.raises(FactorError, match="rank is"):
            aggregate("svd", [site(4)], [1], rank=rank)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="extra_rank is for rule 'residual'"):
        aggregate("svd", [site(4)], [1], extra_rank=2)
    with pytest.raises(RoundError, match="with 2 names"):
        aggregate("svd", [site(4)], [1], names=["a", "b"])


# ----------------------------------------------------------------------------- precision


def test_sums_run_in_fp64() -> None:
    # bf16 factors whose mean bf16 cannot hold
    factors = [(b.bfloat16(), a.bfloat16(), s) for b, a, s in sites((8,) * 16)]
    weights = [1.0] * 16
    made = aggregate("avg", factors, weights)
    exact = torch.stack([b.double() for b, _, _ in factors]).mean(0)
    assert away(made.B, exact) < 1e-6
    rough = torch.zeros(60, 8, dtype=torch.bfloat16)
    for b, _, _ in factors:
        rough += b / 16
    assert away(rough, exact) > 1e-3
    for rule in EXACT:
        assert away(aggregate(rule, factors, weights).dense(), mean_update(factors, weights)) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_inputs_are_left_alone_and_results_repeat(rule: str) -> None:
    b, a, s = site(8)
    b.requires_grad_()
    factors = [(b, a, s), (b, a, s)]
    kept = b.detach().clone(), a.clone()
    one, two = (aggregate(rule, factors, [1, 2]) for _ in range(2))
    assert torch.equal(b, kept[0])
    assert torch.equal(a, kept[1])
    assert torch.equal(one.A, two.A)
    assert torch.equal(one.B, two.B)
    assert not one.B.requires_grad
    assert one.A.data_ptr() != a.data_ptr()


# ---------------------------------------------------------------------------- properties


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[SiteFactors], list[float]]:
    out, inside = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    count = draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    same_scale = draw(st.booleans())
    factors: list[SiteFactors] = []
    for _ in range(count):
        rank = draw(st.sampled_from([1, 2, 4, 8, 16]))
        size = draw(st.sampled_from([0.0, 1e-6, 1.0, 1e3]))
        b = torch.randn(out, rank, generator=generator) * size
        a = torch.randn(rank, inside, generator=generator)
        if draw(st.booleans()):
            a[-1] = a[0]  # rank below what it says
        scale = 2.0 if same_scale else draw(st.sampled_from([0.25, 1.0, 2.0, 5.6568]))
        factors.append((b, a, scale))
    weights = draw(
        st.lists(st.one_of(st.integers(0, 5000), st.floats(0, 1)), min_size=count, max_size=count)
    )
    if not any(weights):
        weights[0] = 1
    return factors, weights


@settings(max_examples=60, deadline=None)
@given(mixtures(), st.sampled_from([None, 1, 3, 20]))
def test_any_mixture(mixture: tuple[list[SiteFactors], list[float]], rank: int | None) -> None:
    factors, weights = mixture
    exact = mean_update(factors, weights)
    # Rounding is of the size of what is added, which may cancel.
    size = sum(
        w / math.fsum(weights) * s * float(b.double().norm() * a.double().norm())
        for (b, a, s), w in zip(factors, weights, strict=True)
    )
    for rule in ("avg", *EXACT, "svd"):
        made = aggregate(rule, factors, weights, rank)
        off = float((made.dense().double() - exact).norm())
        assert bool(torch.isfinite(made.A).all() and torch.isfinite(made.B).all())
        parts = float(made.B.double().norm() * made.A.double().norm()) * made.scale
        rounding = 1e-6 * max(size, parts) + 1e-40
        if rule == "residual" or (rule == "stack" and rank is None):
            assert off <= rounding
            assert made.error == 0.0
        if math.isfinite(made.error):
            said = made.error * float(exact.norm())
            assert off == pytest.approx(said, rel=1e-4, abs=rounding)
        if rule == "svd":
            kept = max(a.shape[0] for _, a, _ in factors) if rank is None else rank
            tail = float(torch.linalg.svdvals(exact)[kept:].norm())
            assert off == pytest.approx(tail, rel=1e-4, abs=1e-6 * size + 1e-40)


@settings(max_examples=25, deadline=None)
@given(mixtures())
def test_the_order_of_sites_changes_last_bits_only(
    mixture: tuple[list[SiteFactors], list[float]],
) -> None:
    factors, weights = mixture
    for rule in ("avg", *EXACT):
        one = aggregate(rule, factors, weights).dense()
        other = aggregate(rule, factors[::-1], weights[::-1]).dense()
        size = max(float(b.norm() * a.norm()) * s for b, a, s in factors)
        assert float((one - other).norm()) <= 1e-5 * size
