"""Keeping the largest values of each chunk: indices packed, values to a value codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flower_geo.compression.bits import pack_bits, packed_size, unpack_bits
from flower_geo.errors import CorruptPayload

__all__ = ["Selection", "TopK"]

Indices = NDArray[np.int64]


@runtime_checkable
class Selection(Protocol):
    """Chooses the values that are sent; how many follows from the tensor's size alone."""

    @property
    def spec(self) -> str:
        """Canonical spec."""

    def kept(self, count: int) -> int:
        """Values kept of ``count``."""

    def index_size(self, count: int) -> int:
        """Exact bytes of the packed indices."""

    def select(self, values: NDArray[np.float32]) -> Indices:
        """Flat indices kept, ascending."""

    def pack(self, indices: Indices, count: int) -> bytes:
        """Packed indices."""

    def unpack(self, data: memoryview, count: int) -> Indices:
        """Inverse of :meth:`pack`; raises ``CorruptPayload`` unless they are distinct and valid."""


#: Values looked at together; they stay in the cache.
_PIECE = 1 << 17


def _largest(rows: NDArray[np.int32], keep: int) -> Indices:
    """Flat places of the ``keep`` largest of each row, ascending; the first of equals."""
    place = rows.shape[1] - keep
    least = np.partition(rows, place, axis=1)[:, place, None]
    marks = rows >= least
    found = np.flatnonzero(marks)
    if found.size > keep * len(rows):
        tied = np.flatnonzero(np.count_nonzero(marks, axis=1) > keep)
        above, equal = rows[tied] > least[tied], rows[tied] == least[tied]
        room = keep - np.count_nonzero(above, axis=1)
        marks[tied] = above | (equal & (np.cumsum(equal, axis=1) <= room[:, None]))
        found = np.flatnonzero(marks)
    return found


def _magnitudes(values: NDArray[np.float32]) -> NDArray[np.int32]:
    """Integers in the order of the magnitudes: fp32 without its sign; they sort faster."""
    return np.bitwise_and(values.view(np.int32), np.int32(0x7FFFFFFF))


@dataclass(frozen=True)
class TopK:
    """The ``density`` share of largest magnitudes in each chunk of ``chunk`` values.

    Chunked as in SparseLoCo (arXiv:2508.15706), so that an index takes
    ``log2(chunk)`` bits, or one bit a value as a bitmap where that is smaller.
    A last short chunk is padded, not cut at a divisor of some dimension.

    Attributes:
        density: share kept, above 0.
        chunk: values chosen among.
        index: ``auto``, or ``bitmap`` at any density: longer, but before a packer
            shorter, since packed indices look like noise to it.
    """

    density: float
    chunk: int
    index: str = "auto"

    @property
    def spec(self) -> str:
        """``topk(density=0.03,chunk=4096)``."""
        index = "" if self.index == "auto" else f",index={self.index}"
        return f"topk(density={self.density!r},chunk={self.chunk}{index})"

    def _keep(self, length: int) -> int:
        return min(length, max(1, round(self.density * length))) if length else 0

    def _layout(self, count: int) -> tuple[int, int, int, int]:
        """Whole chunks, values kept in each, values of the last chunk, kept of those."""
        whole, rest = divmod(count, self.chunk)
        return whole, self._keep(self.chunk), rest, self._keep(rest)

    @property
    def _bits(self) -> int:
        return max(1, (self.chunk - 1).bit_length())

    @property
    def _bitmap(self) -> bool:
        return self.index == "bitmap" or self._keep(self.chunk) * self._bits > self.chunk

    def kept(self, count: int) -> int:
        """Values kept of ``count``."""
        whole, keep, _, last = self._layout(count)
        return whole * keep + last

    def index_size(self, count: int) -> int:
        """Bytes of the packed indices."""
        return packed_size(count, 1) if self._bitmap else packed_size(self.kept(count), self._bits)

    def select(self, values: NDArray[np.float32]) -> Indices:
        """Flat indices kept, ascending; exactly :meth:`kept` of them.

        Of equal magnitudes those that come first are kept, on every machine.
        """
        whole, keep, rest, last = self._layout(values.size)
        out = np.empty(self.kept(values.size), dtype=np.int64)
        step = max(1, _PIECE // self.chunk)
        for row in range(0, whole, step):
            start, stop = row * self.chunk, min(row + step, whole) * self.chunk
            rows = _magnitudes(values[start:stop]).reshape(-1, self.chunk)
            here = out[row * keep :][: len(rows) * keep]
            np.add(_largest(rows, keep), start, out=here)
        if rest:
            start = whole * self.chunk
            tail = _magnitudes(values[start:]).reshape(1, rest)
            np.add(_largest(tail, last), start, out=out[whole * keep :])
        return out

    def pack(self, indices: Indices, count: int) -> bytes:
        """Packed indices."""
        if self._bitmap:
            marks = np.zeros(count, dtype=np.uint8)
            marks[indices] = 1
            return np.packbits(marks, bitorder="little").tobytes()
        return pack_bits((indices % self.chunk).astype(np.uint32), self._bits)

    def unpack(self, data: memoryview, count: int) -> Indices:
        """Flat indices; refused unless in range, ascending and as many as the spec says.

        Raises:
            CorruptPayload: they are not what an encoder writes.
        """
        whole, keep, _, last = self._layout(count)
        if self._bitmap:
            raw = np.frombuffer(data, dtype=np.uint8)
            marks = np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)
            split = whole * self.chunk
            counts = np.count_nonzero(marks[:split].reshape(whole, self.chunk), axis=1)
            if bool((counts != keep).any()) or np.count_nonzero(marks[split:]) != last:
                raise CorruptPayload("a top-k bitmap marks another number of values than it should")
            return np.flatnonzero(marks)
        within = unpack_bits(data, self.kept(count), self._bits).astype(np.int64)
        body, tail = within[: whole * keep].reshape(whole, keep), within[whole * keep :]
        short = count - whole * self.chunk
        ascending = bool((np.diff(body, axis=1) > 0).all()) and bool((np.diff(tail) > 0).all())
        in_range = (not body.size or int(body.max()) < self.chunk) and (
            not tail.size or int(tail.max()) < short
        )
        if not (ascending and in_range):
            raise CorruptPayload("top-k indices are out of range or not ascending")
        return np.concatenate(
            [(body + np.arange(whole)[:, None] * self.chunk).reshape(-1), tail + whole * self.chunk]
        )
