"""Weights, bad input and precision of LoRA aggregation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from flower_geo.aggregation.lora import RULES, aggregate
from flower_geo.errors import ConfigError, FactorError, RoundError
from tests.aggregation.adapters import EXACT, away, mean_update, site, sites

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
        (gradient,) = torch.autograd.grad(((x @ (b @ a).T - y) ** 2).sum(1).mean(), b)
        return -0.1 * gradient

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
