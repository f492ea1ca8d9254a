"""LoRA aggregation of any mixture of shapes, ranks, sizes and weights."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_geo.aggregation.lora import SiteFactors, aggregate
from tests.aggregation.adapters import EXACT, mean_update


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
