"""Products of two thin matrices, without ever forming them.

``B`` is [out, r] and ``A`` [r, in], fp64 here; what is computed costs
O((out + in) r^2) time and O((out + in) r) memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["Pair", "compact", "norm", "padded", "product_svd", "stacked", "svd_order", "truncate"]

Pair = tuple[Tensor, Tensor]
#: Singular values below this share of the largest are rounding.
_ROUNDING = 1e-12


def stacked(pairs: Sequence[Pair]) -> Pair:
    """One pair whose product is the sum of the products; ranks add up."""
    return torch.cat([b for b, _ in pairs], 1), torch.cat([a for _, a in pairs], 0)


def padded(b: Tensor, a: Tensor, rank: int) -> Pair:
    """The same product with zeros up to ``rank``."""
    more = rank - a.shape[0]
    if more <= 0:
        return b, a
    return torch.cat([b, b.new_zeros(b.shape[0], more)], 1), torch.cat(
        [a, a.new_zeros(more, a.shape[1])], 0
    )


def product_svd(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular values and vectors of ``B A``: U [out, k], S [k], Vh [k, in] with k <= r.

    QR of both sides leaves a core of [k, k].  Signs are fixed: the entry of largest
    magnitude in each left vector is positive.
    """
    left, upper = torch.linalg.qr(b)
    right, lower = torch.linalg.qr(a.T)
    u, s, vh = torch.linalg.svd(upper @ lower.T, full_matrices=False)
    u, vh = left @ u, vh @ right.T
    at = u.abs().argmax(0)
    sign = torch.sign(u.gather(0, at[None])[0])
    sign[sign == 0] = 1
    return u * sign, s, vh * sign[:, None]


def norm(b: Tensor, a: Tensor) -> float:
    """Frobenius norm of ``B A``."""
    if not b.numel() or not a.numel():
        return 0.0
    return float(torch.linalg.norm(torch.linalg.qr(b)[1] @ torch.linalg.qr(a.T)[1].T))


def svd_order(b: Tensor, a: Tensor) -> Pair:
    """The same product, columns of B and rows of A by falling singular value, evenly shared."""
    u, s, vh = product_svd(b, a)
    root = s.sqrt()
    return padded(u * root, vh * root[:, None], a.shape[0])


def truncate(b: Tensor, a: Tensor, rank: int) -> Pair:
    """The best approximation of ``B A`` with ``rank`` (Eckart and Young), in SVD order.

    A product of lower rank is filled up with zeros.
    """
    u, s, vh = product_svd(b, a)
    root = s[:rank].sqrt()
    return padded(u[:, :rank] * root, vh[:rank] * root[:, None], rank)


def compact(b: Tensor, a: Tensor, rank: int | None = None) -> Pair:
    """The same product at the rank it really has, or its best approximation at ``rank``."""
    u, s, vh = product_svd(b, a)
    real = int((s > _ROUNDING * s.max()).sum()) if s.numel() else 0
    keep = max(1, real if rank is None else min(rank, real))
    root = s[:keep].sqrt()
    return u[:, :keep] * root, vh[:keep] * root[:, None]
