"""The rules by which adapters of several sites become one."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_geo.aggregation.lora.factors import Pair, Site, SiteFactors, checked, to_fp32
from flower_geo.aggregation.lora.lowrank import Term, check_rank, decompose, norms
from flower_geo.errors import ConfigError, FactorError

__all__ = ["RULES", "Aggregate", "aggregate"]


@dataclass(frozen=True)
class Aggregate:
    """What sites' adapters of one module became.

    Attributes:
        rule: by which.
        A: fp32 [rank, in].
        B: fp32 [out, rank].
        scale: of the adapter, in whose units B is: the sites' own where they have the
            same, else 1.
        extra: fp32 (B, A) at scale 1, to be added to the frozen matrix; None for none.
        error: Frobenius norm of the exact weighted mean of the updates minus all of this,
            divided by that mean's norm; rounding to fp32 is not in it.  0 for what is
            exact, infinity where the mean is zero and this is not.
    """

    rule: str
    A: Tensor
    B: Tensor
    scale: float
    extra: Pair | None
    error: float

    @property
    def rank(self) -> int:
        """Of the adapter."""
        return self.A.shape[0]

    def at_scale_one(self) -> Pair:
        """Everything as one pair (B, A) for folding into the frozen matrix: fp32, scale 1."""
        left = to_fp32(self.B.double() * self.scale, "B")
        if self.extra is None:
            return left, self.A
        return torch.cat([left, self.extra[0]], dim=1), torch.cat([self.A, self.extra[1]], dim=0)

    def dense(self) -> Tensor:
        """``scale * B @ A`` plus the extra part as one fp32 matrix [out, in].

        For checks and small matrices: nothing else here is of this size.
        """
        total = self.scale * (self.B.double() @ self.A.double())
        if self.extra is not None:
            total += self.extra[0].double() @ self.extra[1].double()
        return total.float()


def aggregate(
    rule: str,
    factors: Sequence[SiteFactors],
    weights: Sequence[float],
    rank: int | None = None,
    *,
    extra_rank: int | None = None,
    names: Sequence[str] | None = None,
) -> Aggregate:
    """One adapter from those of several sites, for one module.

    The rules, with p_i the weights divided by their sum:

    - ``avg``: means of A and of B, each by itself, smaller ranks filled up with zeros.
      Not the mean of the products: ``error`` says by how much.
    - ``ffa``: mean of B over one A, which must be equal at all sites; a site of smaller
      rank has that A's first rows.  Exact.
    - ``alternate``: mean of whichever side differs; the other must be equal at all sites
      (a smaller rank has its first rows or columns).  Exact.
    - ``stack``: all factors side by side, the weights in B: exact, at the summed rank.
      With ``rank`` the best of that rank.
    - ``residual``: as ``avg``, and what that lacks as low-rank factors in ``extra``:
      exact, unless ``extra_rank`` cuts it.
    - ``svd``: the best approximation of the mean of that rank, by falling singular
      value: a site of rank r is best served by the first r columns of B and rows of A.

    Args:
        rule: one of :data:`RULES`.
        factors: (B [out, r_i], A [r_i, in], scale_i) a site, any float dtypes, any ranks.
            Sums run in fp64 in the order given.
        weights: one a site, finite, not negative: tokens, examples or 1.  A site of
            weight 0 counts nothing.
        rank: of the result; the sites' largest by default, the summed one for ``stack``.
            ``avg`` and ``residual`` fill up with zeros or cut to the best; ``ffa`` and
            ``alternate`` only fill up; ``svd`` and ``stack`` fill up with zeros in B
            and orthonormal rows in A, which training can use.
        extra_rank: most columns of ``extra`` for ``residual``; None for all.
        names: of the sites, for messages; their positions by default.

    Raises:
        ConfigError: no such rule, or ``extra_rank`` with another one than ``residual``.
        FactorError: factors that do not fit, hold NaN or infinity, or differ where they
            must be equal; a rank below 1, or below the sites' where the rule cannot cut.
        RoundError: the weights allow no mean.
    """
    if rule not in RULES:
        near = difflib.get_close_matches(str(rule), RULES, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"no aggregation rule {rule!r}: {hint}there are {', '.join(RULES)}")
    if extra_rank is not None:
        if rule != "residual":
            raise ConfigError(f"extra_rank is for rule 'residual', not for {rule!r}")
        check_rank(extra_rank)
    if rank is not None:
        check_rank(rank)
    sites, largest = checked(factors, weights, names)
    scales = {site.scale for site in sites}
    mix = _Mix(
        sites=sites,
        scale=scales.pop() if len(scales) == 1 else 1.0,
        rank=largest if rank is None else rank,
        wanted=rank,
        extra_rank=extra_rank,
    )
    made = _RULES[rule](mix)
    extra = made.extra
    if extra is not None:
        extra = to_fp32(extra[0] * mix.scale, "extra B"), to_fp32(extra[1], "extra A")
    return Aggregate(rule, to_fp32(made.A, "A"), to_fp32(made.B, "B"), mix.scale, extra, made.error)


@dataclass(frozen=True)
class _Mix:
    """Checked sites and what is asked of them; all sums are in units of ``scale``."""

    sites: list[Site]
    scale: float
    rank: int
    wanted: int | None
    extra_rank: int | None

    def terms(self) -> list[Term]:
        """The exact mean as a sum of products."""
        return [Term(self.coefficient(site), site.B, site.A) for site in self.sites]

    def coefficient(self, site: Site) -> float:
        """Share of a site's product in the mean; goes to one of the two sides only."""
        return site.share * (site.scale / self.scale)


@dataclass(frozen=True)
class _Made:
    """A rule's result in fp64, ``extra`` in units of the mix's scale too."""

    B: Tensor
    A: Tensor
    error: float = 0.0
    extra: Pair | None = None


def _mean_b(mix: _Mix, rank: int) -> Tensor:
    total = torch.zeros(mix.sites[0].B.shape[0], rank, dtype=torch.float64)
    for site in mix.sites:
        total[:, : site.rank].add_(site.B.double(), alpha=mix.coefficient(site))
    return total


def _mean_a(mix: _Mix, rank: int, coefficient: Callable[[Site], float]) -> Tensor:
    total = torch.zeros(rank, mix.sites[0].A.shape[1], dtype=torch.float64)
    for site in mix.sites:
        total[: site.rank].add_(site.A.double(), alpha=coefficient(site))
    return total


def _averages(mix: _Mix) -> Pair:
    width = max(mix.rank, *(site.rank for site in mix.sites))
    left, right = _mean_b(mix, width), _mean_a(mix, width, lambda site: site.share)
    if width > mix.rank:
        cut = decompose([Term(1.0, left, right)], mix.rank)
        return cut.B, cut.A
    return left, right


def _relative(rest: float, whole: float) -> float:
    if whole > 0:
        return rest / whole
    return math.inf if rest > 0 else 0.0


def _avg(mix: _Mix) -> _Made:
    left, right = _averages(mix)
    return _Made(left, right, _relative(*norms([*mix.terms(), Term(-1.0, left, right)])))


def _residual(mix: _Mix) -> _Made:
    left, right = _averages(mix)
    terms = [*mix.terms(), Term(-1.0, left, right)]
    rest = decompose(terms, None)
    columns = rest.A.shape[0]
    if columns == 0:
        return _Made(left, right)
    kept = min(columns, mix.extra_rank or columns)
    lost = float(torch.linalg.vector_norm(rest.values[kept:]))
    error = _relative(lost, norms(terms)[1]) if lost else 0.0
    return _Made(left, right, error, (rest.B[:, :kept], rest.A[:kept]))


def _svd(mix: _Mix) -> _Made:
    found = decompose(mix.terms(), mix.rank)
    whole = float(torch.linalg.vector_norm(found.values))
    return _Made(found.B, found.A, _relative(found.lost(), whole))


def _stack(mix: _Mix) -> _Made:
    if mix.wanted is not None:
        return _svd(mix)
    left = [site.B.double() * mix.coefficient(site) for site in mix.sites]
    return _Made(torch.cat(left, dim=1), torch.cat([site.A.double() for site in mix.sites]))


def _ffa(mix: _Mix) -> _Made:
    _only_fill_up(mix, "ffa")
    shared = _Shared([site.A for site in mix.sites])
    if not shared.holds():
        odd = mix.sites[shared.odd()]
        raise FactorError(
            f"site {odd.name}: its A differs from other sites': ffa freezes A, so all must have "
            "drawn it from the same seed",
            odd.index,
        )
    if not bool(shared.longest.any()):
        raise FactorError("A is all zero, so B has no effect: ffa needs A drawn at random")
    return _Made(_mean_b(mix, mix.rank), shared.filled(mix.rank))


def _alternate(mix: _Mix) -> _Made:
    _only_fill_up(mix, "alternate")
    right = _Shared([site.A for site in mix.sites])
    if right.holds():
        return _Made(_mean_b(mix, mix.rank), right.filled(mix.rank))
    left = _Shared([site.B.T for site in mix.sites])
    if left.holds():
        return _Made(left.filled(mix.rank).T, _mean_a(mix, mix.rank, mix.coefficient))
    odd = mix.sites[max(left, right, key=lambda side: sum(side.agreements())).odd()]
    raise FactorError(
        f"site {odd.name}: both its A and its B differ from other sites': alternate trains one "
        "side a round and keeps the other as it was sent",
        odd.index,
    )


def _only_fill_up(mix: _Mix, rule: str) -> None:
    largest = max(mix.sites, key=lambda site: site.rank)
    if largest.rank > mix.rank:
        raise FactorError(
            f"site {largest.name}: its rank {largest.rank} is above {mix.rank}, and {rule} "
            "cannot cut a rank: ask for that rank or take rule svd",
            largest.index,
        )


class _Shared:
    """One side of all sites' factors, which should be the same.

    Args:
        sides: [r_i, n] a site; a smaller one should be the first rows of a larger one.
    """

    def __init__(self, sides: Sequence[Tensor]) -> None:
        self.sides = sides
        self.longest = max(sides, key=len)

    def holds(self) -> bool:
        """They are the same, value for value."""
        return all(self._same(side, self.longest) for side in self.sides)

    def filled(self, rank: int) -> Tensor:
        """The longest in fp64, with rows of zeros up to ``rank``."""
        missing = rank - len(self.longest)
        return torch.nn.functional.pad(self.longest.double(), (0, 0, 0, missing))

    def agreements(self) -> list[int]:
        """How many sites, itself included, each one agrees with."""
        return [sum(self._same(one, other) for other in self.sides) for one in self.sides]

    def odd(self) -> int:
        """Position of the site that agrees with the fewest."""
        found = self.agreements()
        return found.index(min(found))

    @staticmethod
    def _same(one: Tensor, other: Tensor) -> bool:
        rows = min(len(one), len(other))
        return one.dtype == other.dtype and torch.equal(one[:rows], other[:rows])


_RULES: dict[str, Callable[[_Mix], _Made]] = {
    "avg": _avg,
    "ffa": _ffa,
    "stack": _stack,
    "residual": _residual,
    "svd": _svd,
    "alternate": _alternate,
}
#: Names of the rules.
RULES = tuple(_RULES)
