"""From the adapters of many sites to one: six rules, and how far each is from the mean.

A site's update is ``s B A`` (arXiv:2106.09685); the exact mean is ``sum p s B A``.  The
mean of the factors is another thing: with equal scales it misses by
``s sum p (B - mean B)(A - mean A)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_geo.aggregation.lora.factors import (
    Pair,
    compact,
    norm,
    padded,
    product_svd,
    stacked,
    truncate,
)
from flower_geo.errors import RoundError

__all__ = ["RULES", "Aggregate", "Factors", "aggregate"]

#: (B [out, r], A [r, in], scale) of one site.
Factors = tuple[Tensor, Tensor, float]


@dataclass(frozen=True)
class Aggregate:
    """What a rule made of the sites' factors.

    Attributes:
        B, A: the next adapter, fp32 [out, rank] and [rank, in].
        scale: its scale.
        extra: what is to be added to the frozen base besides, as factors (B, A) of scale
            1, or None.
        error: relative Frobenius error of all of it against the exact mean.
    """

    B: Tensor
    A: Tensor
    scale: float
    extra: Pair | None
    error: float

    def dense(self) -> Tensor:
        """The whole update of the base, ``scale B A`` and what is extra, fp32 [out, in]."""
        whole = self.scale * (self.B.double() @ self.A.double())
        if self.extra is not None:
            whole += self.extra[0].double() @ self.extra[1].double()
        return whole.float()


@dataclass(frozen=True)
class _Sites:
    """Checked factors in fp64; scales are in B, as units of ``scale``."""

    pairs: list[Pair]
    parts: list[float]
    scale: float

    @property
    def rank(self) -> int:
        return max(a.shape[0] for _, a in self.pairs)

    def exact(self) -> Pair:
        """Factors of the exact mean, over ``scale``; the weight on one side only."""
        return stacked([(p * b, a) for p, (b, a) in zip(self.parts, self.pairs, strict=True)])

    def averaged(self) -> Pair:
        """The mean of each factor; those of lower rank count as zeros above theirs."""
        whole = [padded(b, a, self.rank) for b, a in self.pairs]
        b = _mean([b for b, _ in whole], self.parts)
        return b, _mean([a for _, a in whole], self.parts)


def aggregate(
    rule: str,
    factors: Sequence[Factors],
    weights: Sequence[float],
    rank: int | None = None,
    *,
    extra_rank: int | None = None,
) -> Aggregate:
    """Make one adapter of many.

    Args:
        rule: ``avg`` (FedIT: mean of A, mean of B), ``ffa`` (FFA-LoRA: equal A, mean of
            B; exact), ``stack`` (FLoRA: factors beside each other; exact), ``residual``
            (FedEx-LoRA: ``avg``, and the exact rest for the base), ``svd`` (FlexLoRA: the
            best adapter of ``rank``), ``alternate`` (RoLoRA: the side that was trained;
            exact).
        factors: (B [out, r], A [r, in], scale) a site; ranks and scales may differ.
        weights: non-negative, one a site; only their shares count.
        rank: of the adapter; by default the largest of the sites, for ``stack`` the sum.
        extra_rank: largest rank of what ``residual`` gives the base; None = exact.

    Raises:
        RoundError: the rule is not known, factors do not fit each other or hold NaN or
            infinity, or the weights allow no mean.
    """
    try:
        make = _RULES[rule]
    except KeyError:
        raise RoundError(f"aggregation {rule!r} is not known (known: {', '.join(RULES)})") from None
    if rank is not None and rank < 1:
        raise RoundError(f"rank={rank} is no rank of an adapter; use 1 or more")
    return make(_checked(factors, weights), rank, extra_rank)


def _checked(factors: Sequence[Factors], weights: Sequence[float]) -> _Sites:
    if not factors or len(factors) != len(weights):
        raise RoundError(f"{len(factors)} sites' factors and {len(weights)} weights make no mean")
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise RoundError("a site has a negative or infinite weight")
    total = math.fsum(weights)
    if total <= 0:
        raise RoundError("no site has any weight, so there is no mean")
    first_b, first_a, first_scale = factors[0]
    for index, (b, a, scale) in enumerate(factors):
        shapes = f"B {list(b.shape)} and A {list(a.shape)}"
        if b.dim() != 2 or a.dim() != 2 or b.shape[1] != a.shape[0] or not a.shape[0]:
            raise RoundError(f"factors {index} are {shapes}, not [out, r] and [r, in]")
        if b.shape[0] != first_b.shape[0] or a.shape[1] != first_a.shape[1]:
            raise RoundError(
                f"factors {index} are {shapes}, those of the first site B {list(first_b.shape)} "
                f"and A {list(first_a.shape)}; they belong to other modules"
            )
        if not math.isfinite(scale) or scale <= 0:
            raise RoundError(f"factors {index} have the scale {scale}, not one above 0")
        for name, tensor in (("B", b), ("A", a)):
            if not bool(torch.isfinite(tensor).all()):
                raise RoundError(f"{name} of factors {index} holds NaN or infinity")
    same = all(scale == first_scale for _, _, scale in factors)
    unit = first_scale if same else 1.0
    return _Sites(
        [(b.double() if same else b.double() * scale, a.double()) for b, a, scale in factors],
        [weight / total for weight in weights],
        unit,
    )


def _mean(tensors: Sequence[Tensor], parts: Sequence[float]) -> Tensor:
    total = torch.zeros_like(tensors[0])
    for tensor, part in zip(tensors, parts, strict=True):
        total.add_(tensor, alpha=part)
    return total


def _made(
    sites: _Sites, pair: Pair, error: float, rank: int | None = None, extra: Pair | None = None
) -> Aggregate:
    """Round to fp32, at ``rank`` where one is given."""
    b, a = pair
    if rank is not None and rank != a.shape[0]:
        if rank < a.shape[0]:
            exact, (b, a) = norm(b, a), truncate(b, a, rank)
            if exact:
                error = _gap(sites, (b, a))
        else:
            b, a = padded(b, a, rank)
    rounded = None if extra is None else (extra[0].float(), extra[1].float())
    return Aggregate(b.float(), a.float(), sites.scale, rounded, error)


def _gap(sites: _Sites, pair: Pair) -> float:
    """Relative Frobenius error of ``pair`` against the exact mean."""
    exact = sites.exact()
    size = norm(*exact)
    rest = norm(*stacked([exact, (-pair[0], pair[1])]))
    return rest / size if size else (0.0 if rest == 0 else math.inf)


def _avg(sites: _Sites, rank: int | None, extra_rank: int | None) -> Aggregate:
    pair = sites.averaged()
    return _made(sites, pair, _gap(sites, pair), rank)


def _same(tensors: Sequence[Tensor], side: int) -> bool:
    """Whether all are the beginning of the largest, to the bit, along their rank."""
    largest = max(tensors, key=lambda tensor: tensor.shape[side])
    return all(
        torch.equal(tensor, largest.narrow(side, 0, tensor.shape[side])) for tensor in tensors
    )


def _ffa(sites: _Sites, rank: int | None, extra_rank: int | None) -> Aggregate:
    if not _same([a for _, a in sites.pairs], 0):
        raise RoundError(
            "ffa averages B over one frozen A, and the sites' A differ; start them from one seed"
        )
    a = max((a for _, a in sites.pairs), key=len)
    if not bool(a.any()):
        raise RoundError("ffa cannot train over an A of zeros; start it from a seed")
    b, _ = sites.averaged()
    return _made(sites, (b, a), 0.0, rank)


def _alternate(sites: _Sites, rank: int | None, extra_rank: int | None) -> Aggregate:
    b, a = sites.averaged()
    if _same([a for _, a in sites.pairs], 0):
        a = max((a for _, a in sites.pairs), key=len)
    elif _same([b for b, _ in sites.pairs], 1):
        b = max((b for b, _ in sites.pairs), key=lambda each: each.shape[1])
    else:
        raise RoundError(
            "alternate averages one side over the other, and the sites differ in both A and B; "
            "each round one side must be frozen"
        )
    return _made(sites, (b, a), 0.0, rank)


def _stack(sites: _Sites, rank: int | None, extra_rank: int | None) -> Aggregate:
    return _made(sites, sites.exact(), 0.0, rank)


def _residual(sites: _Sites, rank: int | None, extra_rank: int | None) -> Aggregate:
    b, a = sites.averaged()
    if rank is not None:
        b, a = truncate(b, a, rank) if rank < a.shape[0] else padded(b, a, rank)
    rest = stacked([sites.exact(), (-b, a)])
    rest_b, rest_a = compact(rest[0] * sites.scale, rest[1], extra_rank)
    size, lost = norm(*sites.exact()) * sites.scale, 0.0
    if extra_rank is not None:
        lost = norm(*stacked([(rest[0] * sites.scale, rest[1]), (-rest_b, rest_a)]))
    return _made(sites, (b, a), lost / size if size else 0.0, None, (rest_b, rest_a))


def _svd(sites: _Sites, rank: int | None, extra_rank: int | None) -> Aggregate:
    wanted = sites.rank if rank is None else rank
    u, s, vh = product_svd(*sites.exact())
    size = float(torch.linalg.norm(s))
    root = s[:wanted].sqrt()
    b, a = padded(u[:, :wanted] * root, vh[:wanted] * root[:, None], wanted)
    error = float(torch.linalg.norm(s[wanted:])) / size if size else 0.0
    # Rows without a singular value are free: with zeros on both sides neither factor
    # would ever have a gradient again, so A keeps the sites' mean there.
    real = int((s[:wanted] > 1e-12 * s.max()).sum()) if size else 0
    _, mean = sites.averaged()
    rows = min(wanted, mean.shape[0])
    a[real:rows], b[:, real:] = mean[real:rows], 0.0
    return Aggregate(b.float(), a.float(), sites.scale, None, error)


_RULES: dict[str, Callable[[_Sites, int | None, int | None], Aggregate]] = {
    "avg": _avg, "ffa": _ffa, "stack": _stack, "residual": _residual, "svd": _svd,
    "alternate": _alternate,
}  # fmt: skip
#: Names of the rules.
RULES = tuple(_RULES)
