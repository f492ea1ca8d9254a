"""The gradient's norm over both halves, the same bits as over the whole model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

__all__ = ["finite", "norms_of", "norms_over", "total_norm"]


def norms_of(gradients: Iterable[Tensor | None]) -> list[float]:
    """Norm of each gradient there is, in order; fp32 values."""
    found = [gradient for gradient in gradients if gradient is not None]
    return [float(norm) for norm in torch._foreach_norm(found, 2.0)] if found else []


def finite(gradients: Iterable[Tensor | None]) -> bool:
    """Whether all of them are."""
    return all(map(math.isfinite, norms_of(gradients)))


def total_norm(norms: Sequence[float], device: torch.device) -> Tensor:
    """Norm of the norms, as ``torch.nn.utils.get_total_norm`` takes it: a 0-d fp32 tensor.

    Equal to the bit to that of the whole model where the norms come in the order
    of its parameters.
    """
    if not norms:
        return torch.zeros((), device=device)
    stacked = torch.tensor(norms, dtype=torch.float32).to(device)
    total: Tensor = torch.linalg.vector_norm(stacked, 2.0)
    return total


def norms_over(
    sites: Sequence[tuple[int, Sequence[float], Sequence[float]]], own: Sequence[float]
) -> list[float]:
    """Norms over both halves, in the order of the whole model's parameters.

    Of several sites each is one entry: the root of their sum of squares is then
    no less than the norm of the sites' mean gradient, weighted by tokens.

    Args:
        sites: (tokens, norms below the cloud's part, norms above it) of each.
        own: norms of the cloud's part.
    """
    if len(sites) == 1:
        _, bottom, top = sites[0]
        return [*bottom, *own, *top]
    total = sum(tokens for tokens, _, _ in sites)
    shares = [math.sqrt(n / total) * math.hypot(*bottom, *top) for n, bottom, top in sites]
    return [*shares, *own]
