"""Linear algebra on sums of low-rank products, at the size of the factors.

A sum of products ``c_i B_i A_i`` is one product of the stacked factors.  With the
QR decompositions of both stacks, ``B = Q_B R_B`` and ``A^T = Q_A R_A``, all of it
is in the small core ``R_B R_A^T``: its singular values are those of the sum, and
its norm is the sum's.  Q is kept as Householder vectors and only ever applied to
the few columns wanted.  All in fp64.

Singular values go to the left factor, ``B = U S`` and ``A = V^T``.  That is how
LoRA begins, with rows of A of about unit length and a small B, and where a value
is zero A's row is still there, so that training can use it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_geo.aggregation.lora.factors import Pair, check_pair, to_fp32
from flower_geo.errors import FactorError

__all__ = [
    "ROUNDING",
    "LowRank",
    "Term",
    "check_rank",
    "combine",
    "compact",
    "decompose",
    "norms",
    "svd_order",
    "truncate",
]

#: What fp64 leaves of something that cancels is smaller than this share of it.
ROUNDING = 1e-12
_TOO_LARGE = "the sum of the factors' products is too large: the factors have grown too far"


@dataclass(frozen=True)
class Term:
    """One product ``coefficient * B @ A`` of a sum.

    Attributes:
        coefficient: any finite number.
        B: [out, r], any float dtype.
        A: [r, in], any float dtype.
    """

    coefficient: float
    B: Tensor
    A: Tensor


@dataclass(frozen=True)
class LowRank:
    """The best approximation of a sum of some rank.

    Attributes:
        B: fp64 [out, rank], orthogonal columns, the longest first.
        A: fp64 [rank, in], orthonormal rows.
        values: fp64, all singular values of the sum, falling; values of no more than
            rounding are 0.
    """

    B: Tensor
    A: Tensor
    values: Tensor

    def lost(self) -> float:
        """Frobenius norm of what the rank leaves out."""
        return float(torch.linalg.vector_norm(self.values[self.A.shape[0] :]))


def decompose(terms: Sequence[Term], rank: int | None) -> LowRank:
    """The best approximation of rank ``rank`` of a sum of products.

    Args:
        terms: at least one, all of the same (out, in).
        rank: columns of the result, filled up with zeros in B and orthonormal rows in
            A; None: as many as there are singular values above rounding.

    Raises:
        FactorError: the sum is beyond what fp64 holds.
    """
    floor = ROUNDING * _size(terms)
    left, left_core = _householder(_stack_left(terms))
    right, right_core = _householder(_stack_right(terms).T)
    core = left_core @ right_core.T
    if not bool(torch.isfinite(core).all()):
        raise FactorError(_TOO_LARGE)
    few = min(core.shape)
    u, values, vh = torch.linalg.svd(core, full_matrices=rank is not None and rank > few)
    values[values <= floor] = 0.0
    kept = int(values.count_nonzero()) if rank is None else rank
    known = min(kept, few)
    u, vh = u[:, :known], vh[: min(kept, vh.shape[0])]
    b = torch.zeros(left.rows, kept, dtype=torch.float64)
    b[:, :known] = left.apply(u, known)
    signs = _signs(b)
    b[:, :known] *= values[:known]
    a = right.apply(vh.T, kept)
    b *= signs
    a *= signs
    return LowRank(b, a.T, values)


def norms(terms: Sequence[Term]) -> tuple[float, float]:
    """Frobenius norms of a sum of products and of the sum without its last one.

    Each is 0 where it is no more than rounding.

    Raises:
        FactorError: a sum is beyond what fp64 holds.
    """
    floor = ROUNDING * _size(terms)
    _, left = _householder(_stack_left(terms))
    right = _stack_right(terms)
    found = []
    # The QR decomposition of the first columns is the first columns of the whole one's.
    for width in (right.shape[0], right.shape[0] - terms[-1].A.shape[0]):
        value = float(torch.linalg.matrix_norm(left[:, :width] @ right[:width]))
        if not math.isfinite(value):
            raise FactorError(_TOO_LARGE)
        found.append(value if value > floor else 0.0)
    return found[0], found[1]


def truncate(B: Tensor, A: Tensor, rank: int) -> Pair:
    """The best factors of rank ``rank`` for ``B @ A``, in the order of :func:`svd_order`.

    Args:
        B: [out, r].
        A: [r, in].
        rank: may be more than r: B then has columns of zeros.

    Returns:
        fp32 [out, rank] and [rank, in].

    Raises:
        FactorError: the factors do not fit each other or are not finite, or a rank below 1.
    """
    check_pair(B, A)
    check_rank(rank)
    return _fp32(decompose([Term(1.0, B.detach(), A.detach())], rank))


def svd_order(B: Tensor, A: Tensor) -> Pair:
    """Factors of the same product whose first k columns and rows are its best rank-k form.

    ``B = U S`` and ``A = V^T`` with falling singular values; the largest entry of each
    column of B is positive.

    Args:
        B: [out, r].
        A: [r, in].

    Returns:
        fp32 [out, r] and [r, in].

    Raises:
        FactorError: the factors do not fit each other or are not finite.
    """
    return truncate(B, A, A.shape[0])


def combine(pairs: Sequence[Pair]) -> Pair:
    """One pair whose product is the sum of the products, at the summed rank.

    Args:
        pairs: at least one (B [out, r_i], A [r_i, in]), all of the same out and in.

    Returns:
        fp32 [out, sum r_i] and [sum r_i, in].

    Raises:
        FactorError: none given, or they do not fit each other.
    """
    if not pairs:
        raise FactorError("there are no factors to combine")
    shapes = {check_pair(b, a) for b, a in pairs}
    if len(shapes) > 1:
        raise FactorError(f"factors of different matrices cannot be combined: {sorted(shapes)}")
    left = torch.cat([to_fp32(b.detach(), "B") for b, _ in pairs], dim=1)
    return left, torch.cat([to_fp32(a.detach(), "A") for _, a in pairs], dim=0)


def compact(B: Tensor, A: Tensor, rank: int | None = None) -> Pair:
    """The same product at its true rank, or the best of at most ``rank``.

    Args:
        B: [out, r].
        A: [r, in].
        rank: None for no bound.

    Returns:
        fp32 factors in the order of :func:`svd_order`, without columns of zeros; one such
        column where the product is zero.

    Raises:
        FactorError: the factors do not fit each other or are not finite, or a rank below 1.
    """
    check_pair(B, A)
    terms = [Term(1.0, B.detach(), A.detach())]
    if rank is not None:
        check_rank(rank)
    found = decompose(terms, None)
    if found.A.shape[0] == 0:
        found = decompose(terms, 1)
    return _fp32(found, rank)


def check_rank(rank: object) -> None:
    """Refuse what is no rank.

    Raises:
        FactorError: ``rank`` is no whole number of at least 1.
    """
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise FactorError(f"rank is {rank!r}; it must be a whole number of at least 1")


def _fp32(found: LowRank, rank: int | None = None) -> Pair:
    return to_fp32(found.B[:, :rank], "B"), to_fp32(found.A[:rank], "A")


def _size(terms: Sequence[Term]) -> float:
    """Sum of the norms of all rank-1 products: what rounding is measured by."""
    size = 0.0
    for term in terms:
        b = torch.linalg.vector_norm(term.B, dim=0, dtype=torch.float64)
        a = torch.linalg.vector_norm(term.A, dim=1, dtype=torch.float64)
        size += abs(term.coefficient) * float((a * b).sum())
    return size


# Householder's QR rounds each column by that column's own size.  So a site may keep its B
# tiny and its A large and another the other way round: stacked as they are, they are safe.


def _stack_left(terms: Sequence[Term]) -> Tensor:
    """Fp64 [out, sum r_i], coefficients included."""
    width = sum(term.A.shape[0] for term in terms)
    stack, at = torch.empty(terms[0].B.shape[0], width, dtype=torch.float64), 0
    for term in terms:
        rank = term.A.shape[0]
        stack[:, at : at + rank].copy_(term.B).mul_(term.coefficient)
        at += rank
    return stack


def _stack_right(terms: Sequence[Term]) -> Tensor:
    """Fp64 [sum r_i, in]."""
    height = sum(term.A.shape[0] for term in terms)
    stack, at = torch.empty(height, terms[0].A.shape[1], dtype=torch.float64), 0
    for term in terms:
        rank = term.A.shape[0]
        stack[at : at + rank].copy_(term.A)
        at += rank
    return stack


@dataclass(frozen=True)
class _Reflections:
    """Q of a QR decomposition as LAPACK leaves it: Householder vectors and their factors."""

    packed: Tensor
    tau: Tensor

    @property
    def rows(self) -> int:
        return self.packed.shape[0]

    def apply(self, core: Tensor, width: int) -> Tensor:
        """``Q @ core``, filled up to ``width`` columns with further columns of Q, then zeros.

        Args:
            core: [k, at most width], k as many as Q's reflections.
            width: columns of the result.
        """
        known = self.tau.numel()
        full = torch.zeros(self.rows, width, dtype=torch.float64)
        full[:known, : core.shape[1]] = core
        for column in range(core.shape[1], width):
            row = known + column - core.shape[1]
            if row < self.rows:
                full[row, column] = 1.0
        return torch.ormqr(self.packed[:, :known], self.tau, full)


def _householder(stack: Tensor) -> tuple[_Reflections, Tensor]:
    """Q and R [min(rows, columns), columns] of ``stack``."""
    packed, tau = torch.geqrf(stack)
    return _Reflections(packed, tau), packed[: tau.numel()].triu()


def _signs(b: Tensor) -> Tensor:
    """1 or -1 a column: what makes its largest entry positive."""
    largest = b.gather(0, b.abs().argmax(dim=0, keepdim=True)).squeeze(0)
    return torch.where(largest < 0, -1.0, 1.0).to(b.dtype)
