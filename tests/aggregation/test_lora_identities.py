"""The identities of LoRA aggregation, beside dense matrices in fp64."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_geo.aggregation.lora import RULES, aggregate
from flower_geo.aggregation.lora import SiteFactors as Factors

OUT, IN = 24, 40


def site(rank: int, seed: int, scale: float = 2.0, *, out: int = OUT, wide: int = IN) -> Factors:
    maker = torch.Generator().manual_seed(seed)
    return torch.randn(out, rank, generator=maker), torch.randn(rank, wide, generator=maker), scale


def exact(factors: list[Factors], weights: list[float]) -> Tensor:
    total = math.fsum(weights)
    mean = torch.zeros(factors[0][0].shape[0], factors[0][1].shape[1], dtype=torch.float64)
    for (b, a, scale), weight in zip(factors, weights, strict=True):
        mean += weight / total * scale * (b.double() @ a.double())
    return mean


def gap(found: Tensor, wanted: Tensor) -> float:
    return float(torch.linalg.norm(found.double() - wanted) / torch.linalg.norm(wanted))


MIXED = [site(4, 1, 4.0), site(8, 2, 2.0), site(16, 3, 1.0), site(2, 4, 8.0)]
EQUAL = [site(8, seed) for seed in range(4)]
WEIGHTS = [1.0, 5.0, 2.5, 0.5]


@pytest.mark.parametrize("rule", ["stack", "residual"])
@pytest.mark.parametrize("factors", [EQUAL, MIXED], ids=["equal", "mixed"])
def test_the_merged_model_is_the_base_and_the_weighted_mean(
    rule: str, factors: list[Factors]
) -> None:
    made = aggregate(rule, factors, WEIGHTS)
    assert gap(made.dense(), exact(factors, WEIGHTS)) < 1e-6
    assert made.error < 1e-6


@pytest.mark.parametrize("factors", [EQUAL, MIXED], ids=["equal", "mixed"])
@pytest.mark.parametrize("rank", [1, 3, 8, 16, 24])
def test_svd_is_the_best_approximation_of_its_rank(factors: list[Factors], rank: int) -> None:
    made, mean = aggregate("svd", factors, WEIGHTS, rank), exact(factors, WEIGHTS)
    u, s, vh = torch.linalg.svd(mean, full_matrices=False)
    best = u[:, :rank] * s[:rank] @ vh[:rank]
    assert gap(made.dense(), best) < 1e-5
    assert made.B.shape == (OUT, rank) and made.A.shape == (rank, IN)
    tail = float(torch.linalg.norm(s[rank:]) / torch.linalg.norm(s))
    assert math.isclose(made.error, tail, abs_tol=1e-9)
    # The first columns are the best form for a site of lower rank.
    low = max(1, rank // 2)
    sliced = made.scale * made.B[:, :low].double() @ made.A[:low].double()
    assert gap(sliced, u[:, :low] * s[:low] @ vh[:low]) < 1e-5


def test_the_stack_has_the_summed_rank_and_the_weight_on_one_side() -> None:
    two = [site(8, 1, 1.0), site(8, 2, 1.0)]
    made = aggregate("stack", two, [0.9, 0.1])
    assert made.A.shape == (16, IN)
    wanted = 0.9 * two[0][0] @ two[0][1] + 0.1 * two[1][0] @ two[1][1]
    torch.testing.assert_close(made.dense(), wanted, rtol=1e-5, atol=1e-5)
    assert aggregate("stack", MIXED, WEIGHTS).A.shape[0] == 30


def test_avg_averages_factors_and_says_how_far_off_it_is() -> None:
    made = aggregate("avg", EQUAL, [1, 1, 1, 1])
    torch.testing.assert_close(made.A, sum(a for _, a, _ in EQUAL) / 4)
    torch.testing.assert_close(made.B, sum(b for b, _, _ in EQUAL) / 4)
    mean = exact(EQUAL, [1, 1, 1, 1])
    assert math.isclose(made.error, gap(made.dense(), mean), rel_tol=1e-4)
    # s sum p (B_i - B)(A_i - A), the identity of the note on FedIT.
    b, a = made.B.double(), made.A.double()
    missed = sum(0.25 * 2.0 * (bi.double() - b) @ (ai.double() - a) for bi, ai, _ in EQUAL)
    torch.testing.assert_close(mean - made.dense().double(), missed, rtol=1e-4, atol=1e-4)


def test_two_sites_with_one_product_and_other_factors() -> None:
    b, a, scale = site(8, 5)
    turn, _ = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(9)))
    pair = [(b, a, scale), (b @ turn, turn.T @ a, scale)]
    mean = exact(pair, [1, 1])
    for rule in ("stack", "residual", "svd"):
        assert gap(aggregate(rule, pair, [1, 1]).dense(), mean) < 1e-5
    assert aggregate("avg", pair, [1, 1]).error > 0.1


def frozen_a(ranks: list[int]) -> list[Factors]:
    a = site(max(ranks), 7)[1]
    return [(site(rank, 20 + rank)[0], a[:rank], 2.0) for rank in ranks]


@pytest.mark.parametrize("ranks", [[8, 8, 8], [4, 8, 16]])
@pytest.mark.parametrize("rule", ["ffa", "alternate"])
def test_over_a_common_a_the_mean_of_b_is_exact(rule: str, ranks: list[int]) -> None:
    factors = frozen_a(ranks)
    made = aggregate(rule, factors, [1, 2, 3])
    assert gap(made.dense(), exact(factors, [1, 2, 3])) < 1e-6 and made.error == 0
    assert torch.equal(made.A, factors[-1][1])


@pytest.mark.parametrize("ranks", [[8, 8, 8], [4, 8, 16]])
def test_over_a_common_b_the_mean_of_a_is_exact(ranks: list[int]) -> None:
    b = site(max(ranks), 7)[0]
    factors = [(b[:, :rank], site(rank, 30 + rank)[1], 2.0) for rank in ranks]
    made = aggregate("alternate", factors, [1, 2, 3])
    assert gap(made.dense(), exact(factors, [1, 2, 3])) < 1e-6 and made.error == 0
    assert torch.equal(made.B, b)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("ffa", "alternate")])
def test_scales_are_part_of_the_update(rule: str) -> None:
    """Sites of one alpha and different ranks have different scales."""
    factors = [site(8, 1, 16 / 8), site(16, 2, 16 / 16)]
    scaled = [(b * s, a, 1.0) for b, a, s in factors]
    torch.testing.assert_close(
        aggregate(rule, factors, [1, 1]).dense(), aggregate(rule, scaled, [1, 1]).dense()
    )


@pytest.mark.parametrize("rule", RULES)
def test_one_site_keeps_its_own_update(rule: str) -> None:
    one = [site(8, 3)]
    made = aggregate(rule, one, [7.0])
    assert gap(made.dense(), exact(one, [1])) < 1e-6
    if rule in ("avg", "ffa", "alternate"):
        assert torch.equal(made.B, one[0][0]) and torch.equal(made.A, one[0][1])


@pytest.mark.parametrize("rule", RULES)
def test_two_equal_sites_are_one(rule: str) -> None:
    one = site(8, 3)
    made = aggregate(rule, [one, one], [1.0, 3.0])
    assert gap(made.dense(), exact([one], [1])) < 1e-6 and made.error < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_before_the_first_step_the_update_is_zero(rule: str) -> None:
    a = site(8, 1)[1]
    made = aggregate(rule, [(torch.zeros(OUT, 8), a, 2.0)] * 3, [1, 1, 1])
    assert not bool(made.dense().any()) and made.error == 0
    # Neither factor may die: with both at zero there is no gradient for ever.
    assert rule == "residual" or bool(made.A.any())


def test_svd_keeps_free_rows_alive() -> None:
    b, a, scale = site(2, 1)
    made = aggregate("svd", [(b, a, scale), (b, a, scale)], [1, 1], 8)
    assert made.B.shape == (OUT, 8) and not bool(made.B[:, 2:].any())
    four = [(torch.cat([b, torch.zeros(OUT, 6)], 1), torch.cat([a, site(6, 9)[1]]), scale)] * 2
    again = aggregate("svd", four, [1, 1])
    assert bool(again.A.any(1).all()) and gap(again.dense(), exact(four, [1, 1])) < 1e-5


def test_a_rank_below_that_of_the_sites() -> None:
    mean = exact(EQUAL, WEIGHTS)
    for rule in ("avg", "stack", "residual"):
        made = aggregate(rule, EQUAL, WEIGHTS, 3)
        assert made.A.shape == (3, IN)
        assert math.isclose(made.error, gap(made.dense(), mean), rel_tol=1e-3, abs_tol=1e-6)
    assert aggregate("residual", EQUAL, WEIGHTS, 3).error < 1e-6


def test_a_truncated_residual_says_what_it_loses() -> None:
    mean = exact(EQUAL, WEIGHTS)
    errors = []
    for rank in (1, 8, 24):
        made = aggregate("residual", EQUAL, WEIGHTS, extra_rank=rank)
        assert made.extra is not None and made.extra[1].shape[0] <= rank
        assert math.isclose(made.error, gap(made.dense(), mean), rel_tol=1e-3, abs_tol=1e-6)
        errors.append(made.error)
    assert errors[0] > errors[1] > errors[2]


def test_the_residual_has_no_more_rank_than_the_sites_differ_by() -> None:
    wide = [site(8, seed, out=200, wide=300) for seed in range(4)]
    made = aggregate("residual", wide, [1, 1, 1, 1])
    assert made.extra is not None and made.extra[1].shape[0] == 24


def test_fp32_sums_are_taken_in_fp64() -> None:
    many = [(torch.full((4, 1), 1e-4), torch.ones(1, 4), 1.0)] * 999 + [
        (torch.full((4, 1), 1e4), torch.ones(1, 4), 1.0)
    ]
    made = aggregate("stack", many, [1.0] * 1000)
    assert gap(made.dense(), exact(many, [1.0] * 1000)) < 1e-7


@given(
    ranks=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    seed=st.integers(0, 2**20),
    scales=st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.0]), min_size=6, max_size=6),
)
@settings(max_examples=40, deadline=None)
def test_exact_rules_are_exact(ranks: list[int], seed: int, scales: list[float]) -> None:
    factors = [site(r, seed + i, scales[i], out=9, wide=7) for i, r in enumerate(ranks)]
    weights = [1.0 + (seed + i) % 5 for i in range(len(ranks))]
    mean = exact(factors, weights)
    for rule in ("stack", "residual"):
        assert gap(aggregate(rule, factors, weights).dense(), mean) < 1e-5
    # At full rank the best approximation is the mean itself.
    assert gap(aggregate("svd", factors, weights, 9).dense(), mean) < 1e-5
    best = aggregate("svd", factors, weights).error
    assert best <= aggregate("avg", factors, weights).error + 1e-9


def test_a_site_without_weight_counts_for_nothing() -> None:
    for rule in ("avg", "stack", "residual", "svd"):
        with_it = aggregate(rule, EQUAL[:2], [1.0, 0.0]).dense()
        torch.testing.assert_close(with_it, aggregate(rule, EQUAL[:1], [1.0]).dense())
