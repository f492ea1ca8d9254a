"""What sites send, checked: factors that fit each other, and weights that allow a mean."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from flower_geo.errors import FactorError, RoundError

__all__ = ["Pair", "Site", "SiteFactors", "check_pair", "checked", "to_fp32"]

#: ``(B [out, r], A [r, in])``.
Pair: TypeAlias = tuple[Tensor, Tensor]
#: ``(B [out, r], A [r, in], scale)``: what a site adds to the frozen matrix is ``scale * B @ A``.
SiteFactors: TypeAlias = tuple[Tensor, Tensor, float]


@dataclass(frozen=True)
class Site:
    """One site's part in an aggregation.

    Attributes:
        B: [out, r].
        A: [r, in].
        scale: alpha / r, or alpha / sqrt(r) with rsLoRA.
        share: its weight divided by the sum of all, > 0.
        index: its position among the sites given.
        name: for messages.
    """

    B: Tensor
    A: Tensor
    scale: float
    share: float
    index: int
    name: str

    @property
    def rank(self) -> int:
        """Rows of A."""
        return self.A.shape[0]


def checked(
    factors: Sequence[SiteFactors], weights: Sequence[float], names: Sequence[str] | None
) -> tuple[list[Site], int]:
    """Sites with any weight, and the largest rank of all.

    A site without weight is checked like the others and then left out.

    Raises:
        FactorError: a factor has a wrong type or shape, or holds NaN or infinity.
        RoundError: the weights allow no mean.
    """
    if not factors:
        raise RoundError("there are no factors to aggregate: no site has answered")
    if len(weights) != len(factors):
        raise RoundError(f"{len(factors)} sites' factors came with {len(weights)} weights")
    if names is not None and len(names) != len(factors):
        raise RoundError(f"{len(factors)} sites' factors came with {len(names)} names")
    labels = [str(n) for n in names] if names is not None else [str(i) for i in range(len(factors))]
    shares = _shares(weights, labels)
    found = [_entry(*each) for each in zip(factors, labels, range(len(labels)), strict=True)]
    (usual, _), *_ = Counter((b.shape[0], a.shape[1]) for b, a, _ in found).most_common(1)
    for index, (left, right, _) in enumerate(found):
        shape = left.shape[0], right.shape[1]
        if shape != usual:
            raise FactorError(
                f"site {labels[index]}: its factors give a {shape[0]}x{shape[1]} matrix, other "
                f"sites' a {usual[0]}x{usual[1]} one: all must adapt the same module",
                index,
            )
    sites = [
        Site(*entry, share, index, label)
        for index, (entry, share, label) in enumerate(zip(found, shares, labels, strict=True))
        if share > 0
    ]
    return sites, max(right.shape[0] for _, right, _ in found)


def _entry(entry: SiteFactors, label: str, index: int) -> SiteFactors:
    """One site's factors and scale, checked by themselves."""
    where = f"site {label}: "
    try:
        left, right, scale = entry
        scale = float(scale)
    except (TypeError, ValueError):
        raise FactorError(f"{where}factors must be (B, A, scale)", index) from None
    check_pair(left, right, where, index)
    if not math.isfinite(scale) or scale <= 0:
        raise FactorError(
            f"{where}scale is {scale}; it must be alpha / r, finite and above 0", index
        )
    return left.detach().cpu(), right.detach().cpu(), scale


def check_pair(
    left: Tensor, right: Tensor, where: str = "", index: int | None = None
) -> tuple[int, int]:
    """The (out, in) of factors B and A that fit each other and are finite.

    Args:
        left: B.
        right: A.
        where: put in front of a message.
        index: of the site, for the error.

    Raises:
        FactorError: they do not, or are not.
    """
    both: tuple[tuple[str, object], ...] = (("B", left), ("A", right))
    for letter, factor in both:
        if not isinstance(factor, Tensor) or not factor.is_floating_point():
            kind = str(factor.dtype) if isinstance(factor, Tensor) else type(factor).__name__
            raise FactorError(f"{where}{letter} must be a tensor of floats, not {kind}", index)
        if factor.dim() != 2 or 0 in factor.shape:
            raise FactorError(
                f"{where}{letter} has shape {list(factor.shape)}: two dimensions of at least 1 "
                "are needed, B [out, r] and A [r, in]",
                index,
            )
    if left.shape[1] != right.shape[0]:
        raise FactorError(
            f"{where}B has {left.shape[1]} columns and A has {right.shape[0]} rows: "
            "both must be the rank",
            index,
        )
    for letter, factor in (("B", left), ("A", right)):
        if not bool(torch.isfinite(factor).all()):
            raise FactorError(
                f"{where}{letter} holds NaN or infinity: leave this site out of the round", index
            )
    return left.shape[0], right.shape[1]


def to_fp32(tensor: Tensor, what: str) -> Tensor:
    """``tensor`` in fp32, contiguous.

    Raises:
        FactorError: a value is too large for it.
    """
    cast = tensor.to(torch.float32).contiguous()
    if not bool(torch.isfinite(cast).all()):
        raise FactorError(f"{what} has values too large for fp32: the factors have grown too far")
    return cast


def _shares(weights: Sequence[float], labels: Sequence[str]) -> list[float]:
    """Weights divided by their sum."""
    values = [float(weight) for weight in weights]
    for value, label in zip(values, labels, strict=True):
        if not math.isfinite(value) or value < 0:
            raise RoundError(f"site {label}: weight is {value}; it must be finite and at least 0")
    largest = max(values)
    if largest == 0:
        raise RoundError(
            "every site has weight 0, so there is no mean: no site has trained on anything"
        )
    # By the largest first: their sum may be beyond what a float holds.
    total = math.fsum(value / largest for value in values)
    return [value / largest / total for value in values]
