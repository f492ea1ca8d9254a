"""Factors of made-up sites, and their mean update by the dense way."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flower_geo.aggregation.lora import SiteFactors

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
    pairs = zip(factors, weights, strict=True)
    return torch.stack([w / total * s * (b.double() @ a.double()) for (b, a, s), w in pairs]).sum(0)


def away(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())
