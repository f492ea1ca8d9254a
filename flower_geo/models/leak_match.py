"""Finding vectors in a table by cosine, a piece of the table at a time; ridge regression."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["Ridge", "pieces", "top_matches"]

#: Rows of a table compared at once.
PIECE = 4096
#: Share of the mean diagonal that is added to it.
PENALTY = 1e-3


def pieces(table: Tensor, size: int = PIECE) -> Iterator[Tensor]:
    """Consecutive rows of a table [v, d], at most ``size`` of them at a time."""
    return (table[start : start + size] for start in range(0, len(table), size))


def top_matches(queries: Tensor, table: Iterable[Tensor], count: int) -> Tensor:
    """The rows of a table nearest to each query by cosine, best first.

    Args:
        queries: [n, d].
        table: consecutive pieces [m, d] of the table.
        count: how many rows to name.

    Returns:
        Row numbers [n, min(count, rows)], int64.
    """
    sought = functional.normalize(queries.float(), dim=-1)
    best = sought.new_empty(len(sought), 0)
    rows = torch.empty(len(sought), 0, dtype=torch.long, device=sought.device)
    start = 0
    for piece in table:
        scores = sought @ functional.normalize(piece.float(), dim=-1).T
        found, where = scores.topk(min(count, len(piece)), dim=-1)
        best, rows = torch.cat([best, found], 1), torch.cat([rows, where + start], 1)
        # A stable sort: of equal scores the lower row number, whatever the pieces.
        best, order = best.sort(dim=-1, descending=True, stable=True)
        best, rows = best[:, :count], rows.gather(1, order)[:, :count]
        start += len(piece)
    return rows


class Ridge:
    """A linear map fitted piece by piece: x [n, d] to y [n, e], with intercept, in fp64."""

    def __init__(self, width: int) -> None:
        """For x of ``width`` values."""
        self._xx = torch.zeros(width + 1, width + 1, dtype=torch.float64)
        self._xy: Tensor | None = None

    def add(self, x: Tensor, y: Tensor) -> None:
        """Learn from pairs x [n, d], y [n, e]."""
        given = _with_one(x)
        product = given.T @ y.double().cpu()
        self._xx += given.T @ given
        self._xy = product if self._xy is None else self._xy + product

    def map(self, x: Tensor) -> Tensor:
        """What the map makes of x [n, d]: [n, e], fp32, on the CPU."""
        assert self._xy is not None, "add pairs first"
        penalty = self._xx.diagonal()[:-1].mean() * PENALTY
        penalised = self._xx.clone()
        penalised.diagonal()[:-1] += penalty.clamp_min(1e-12)
        mapped: Tensor = _with_one(x) @ torch.linalg.solve(penalised, self._xy)
        return mapped.float()


def _with_one(x: Tensor) -> Tensor:
    return functional.pad(x.double().cpu(), (0, 1), value=1.0)
