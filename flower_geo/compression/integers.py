"""Integers of 8, 4 and 2 bits under scales of small blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from flower_geo.compression import floats
from flower_geo.compression.bits import packed, packed_size, unpack_bits
from flower_geo.compression.floats import BF16, SCALES, Bytes, Floats, whole, written
from flower_geo.compression.rounding import Dither
from flower_geo.errors import CodecSpecError, CorruptPayload

__all__ = ["Int", "Int2"]

_ZERO, _HALF = np.float32(0.0), np.float32(0.5)
_TINY = np.nextafter(_ZERO, np.float32(1.0))  # smallest positive fp32
_LARGEST = np.finfo(np.float32).max
#: Pieces that 8 and 4 bits are coded in at a time: their many small calls a piece cost
#: more than what then no longer stays in the cache.
_PIECES = 2
#: Largest magnitudes between these need no care: nothing is denormal or overflows.
_LOW, _HIGH = np.float32(2.0**-100), np.float32(2.0**100)


def _step(block: int, pieces: int = 1) -> int:
    """Values in so many pieces: whole blocks, and it begins at a whole byte."""
    return max(1, pieces * floats.PIECE // (4 * block)) * 4 * block


def _rows(values: Floats, block: int, pieces: int = 1) -> Iterator[tuple[int, int, Floats]]:
    """Yield ``(start, stop, rows)``: pieces of the values, a row a block.

    The piece with a block that is cut short is a copy, with zeros after the end.
    """
    step = _step(block, pieces)
    for start in range(0, values.size, step):
        stop = min(start + step, values.size)
        piece, width = values[start:stop], min(block, stop - start)
        if piece.size % width or not (piece.flags.writeable and piece.flags.c_contiguous):
            filled = np.zeros(-(-piece.size // width) * width, dtype=np.float32)
            filled[: piece.size] = piece
            piece = filled
        yield start, stop, piece.reshape(-1, width)


def _up(scale: Floats) -> Floats:
    """The nearest bf16 that is not less; positive."""
    word = scale.view(np.uint32) + np.uint32(0xFFFF)
    return (word & np.uint32(0xFFFF0000)).view(np.float32)


def _below(scale: Floats) -> Floats:
    """The bf16 before a bf16; positive."""
    return (scale.view(np.uint32) - np.uint32(0x10000)).view(np.float32)


@dataclass(frozen=True)
class Int:
    """Symmetric integers of 8 or 4 bits under one scale a block (absmax).

    An outlier costs precision in its own block only.

    Attributes:
        bits: 8 or 4.
        block: values under one scale.
        round: to the nearest code, or up or down at random, such that the
            expectation is the value.
        seed: of that choice.
        scale: how scales are stored; in bf16 they are rounded up, so that no
            value is beyond the largest code (save where that would decode to
            infinity).
    """

    bits: int
    block: int
    round: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    scale: Literal["fp32", "bf16"] = "fp32"
    lossless: ClassVar[bool] = False
    name: ClassVar[str] = "int"

    def __post_init__(self) -> None:
        if self.seed and self.round == "nearest":
            raise CodecSpecError(f"int{self.bits} rounds to nearest; seed= is for round=stochastic")

    @property
    def spec(self) -> str:
        """``int8(block=256)``; an option stands there where it is not the default."""
        options = [f"block={self.block}"]
        if self.round != "nearest":
            options.append(f"round={self.round}")
        if self.seed:
            options.append(f"seed={self.seed}")
        if self.scale != "fp32":
            options.append(f"scale={self.scale}")
        return f"int{self.bits}({','.join(options)})"

    @property
    def top(self) -> int:
        """Largest code: 127 or 7."""
        return (1 << (self.bits - 1)) - 1

    def _head(self, count: int) -> int:
        """Bytes of the scales."""
        return SCALES[self.scale].size(-(-count // self.block))

    def size(self, count: int) -> int:
        """Scales, then codes."""
        return self._head(count) + packed_size(count, self.bits)

    def encode(self, values: Floats) -> bytes:
        """Round to a code."""
        return written(self, values)

    def write(self, values: Floats, out: Bytes) -> bool:
        """Round to a code.  The magnitude of a block tells whether its values are finite."""
        head = self._head(values.size)
        scales = np.empty(-(-values.size // self.block), dtype=np.float32)
        dither = Dither(self.seed, values) if self.round == "stochastic" else None
        shape: tuple[int, ...] = ()
        for start, stop, rows in _rows(values, self.block, _PIECES):
            if rows.shape != shape:
                shape, work = rows.shape, torch.empty(rows.shape)
            source = torch.from_numpy(rows)
            here = scales[start // self.block :][: len(rows)]
            largest = torch.amax(source, 1, out=torch.from_numpy(here))
            torch.maximum(largest, torch.amin(source, 1).neg_(), out=largest)
            high = here.max()
            if not high < np.inf:
                return False
            ordinary = high < _HIGH and bool(
                here.min() > _LOW or ((here > _LOW) | (here == 0)).all()
            )
            self._scale(here, ordinary)
            torch.div(source, largest[:, None], out=work)
            codes = work.view(-1)[: stop - start]
            if dither is None:
                codes.round_()
            else:
                codes.add_(torch.from_numpy(dither.draw(stop - start))).floor_()
            if dither is not None or not ordinary:
                codes.clamp_(-self.top, self.top)
            at, end = (head + packed_size(place, self.bits) for place in (start, stop))
            if self.bits == 8:
                torch.from_numpy(out[at:end]).view(torch.int8).copy_(codes)
            else:
                small = codes.to(torch.int8).add_(self.top).view(torch.uint8)
                out[at:end] = packed(small.numpy(), self.bits)
        return SCALES[self.scale].write(scales, out[:head])

    def _scale(self, largest: Floats, ordinary: bool) -> None:
        """Turn largest magnitudes into scales, in place."""
        top = np.float32(self.top)
        before = largest if ordinary else largest.copy()
        scale = np.maximum(np.divide(largest, top, out=largest), _TINY, out=largest)
        with np.errstate(over="ignore"):
            if not ordinary:
                # A zero block may have any scale; that of a denormal block is
                # coarse and rounded up.
                scale = np.where(before > scale * (top + _HALF), scale + _TINY, scale)
            if self.scale == "bf16":
                scale = _up(scale)
            if not ordinary:  # that of a huge block is kept from decoding to infinity
                less = np.nextafter(scale, _ZERO) if self.scale == "fp32" else _below(scale)
                scale = np.where(np.isinf(scale * top), less, scale)
        largest[:] = scale

    def _scales(self, payload: memoryview, count: int) -> Floats:
        blocks = -(-count // self.block)
        return whole(SCALES[self.scale], payload[: self._head(count)], blocks)

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Code times scale, in fp32."""
        scales = self._scales(payload, count)
        for start in range(0, count, _step(self.block, _PIECES)):
            stop = min(start + _step(self.block, _PIECES), count)
            values = np.empty(stop - start, dtype=np.float32)
            self._decode(payload, scales, count, start, torch.from_numpy(values))
            yield start, values

    def add_to(self, payload: memoryview, count: int, out: Tensor, weight: float) -> None:
        """Add the decoded values, as :meth:`pieces` gives them, to ``out``.

        Raises:
            CorruptPayload: a value is not finite.
        """
        scales = self._scales(payload, count)
        # The code -128 is none that an encoder writes, but it decodes.
        safe = not scales.size or bool(np.abs(scales).max() <= _LARGEST / 256)
        step = min(_step(self.block, _PIECES), count)
        work = torch.empty(step)
        wide = work if out.dtype == work.dtype else torch.empty(step, dtype=out.dtype)
        for start in range(0, count, max(step, 1)):
            values = work[: min(step, count - start)]
            self._decode(payload, scales, count, start, values)
            if not (safe or bool(torch.isfinite(values).all())):
                raise CorruptPayload("a blob decodes to NaN or infinity")
            if wide is not work:
                values = wide[: len(values)].copy_(values)
            out[start : start + len(values)].add_(values, alpha=weight)

    def _decode(
        self, payload: memoryview, scales: Floats, count: int, start: int, out: Tensor
    ) -> None:
        """The values from ``start``, at the beginning of a block, that fill ``out``."""
        head, length = self._head(count), len(out)
        part = payload[head + packed_size(start, self.bits) :]
        part = part[: packed_size(length, self.bits)]
        if self.bits == 8:
            # A copy: torch takes no read-only array.
            out.copy_(torch.from_numpy(np.frombuffer(part, dtype=np.int8).copy()))
        else:
            codes = unpack_bits(part, length, self.bits)
            out.copy_(torch.from_numpy(codes)).sub_(self.top)
        first, (full, rest) = start // self.block, divmod(length, self.block)
        body = length - rest
        factors = torch.from_numpy(scales[first : first + full])
        out[:body].view(full, self.block).mul_(factors[:, None])
        if rest:
            out[body:].mul_(float(scales[first + full]))


@dataclass(frozen=True)
class Int2:
    """Two bits a value: its sign and one of two magnitudes of its block.

    The magnitudes are the mean of the values below and above the block's mean
    magnitude.  At two bits this has half the error of four evenly spread levels
    on the values top-k keeps, which are never near zero.
    """

    block: int
    bits: ClassVar[int] = 2
    lossless: ClassVar[bool] = False
    name: ClassVar[str] = "int2"

    @property
    def spec(self) -> str:
        """``int2(block=64)``."""
        return f"int2(block={self.block})"

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def size(self, count: int) -> int:
        """Two bf16 magnitudes a block, then codes."""
        return 4 * self._blocks(count) + packed_size(count, 2)

    def encode(self, values: Floats) -> bytes:
        """Split each block at its mean magnitude."""
        return written(self, values)

    def write(self, values: Floats, out: Bytes) -> bool:
        """Split each block at its mean magnitude."""
        count = values.size
        head = 4 * self._blocks(count)
        pairs = np.empty((self._blocks(count), 2), dtype=np.float32)
        for start, stop, signed in _rows(values, self.block):
            rows = np.abs(signed).astype(np.float64)
            total = rows.sum(axis=1)
            if not np.isfinite(total).all():
                return False
            real = np.full(len(rows), self.block)
            real[-1] = stop - start - (len(rows) - 1) * self.block
            high = rows > (total / real)[:, None]
            above = high.sum(axis=1)
            here = pairs[start // self.block :][: len(rows)]
            here[:, 1] = (rows * high).sum(axis=1) / np.maximum(above, 1)
            here[:, 0] = (rows * ~high).sum(axis=1) / np.maximum(real - above, 1)
            codes = high.view(np.uint8) | ((signed < 0).view(np.uint8) << np.uint8(1))
            at, end = (head + packed_size(place, 2) for place in (start, stop))
            out[at:end] = packed(codes.reshape(-1)[: stop - start], 2)
        return BF16().write(pairs.reshape(-1), out[:head])

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Sign times magnitude."""
        blocks = self._blocks(count)
        pairs = whole(BF16(), payload[: 4 * blocks], 2 * blocks).reshape(blocks, 2)
        data = payload[4 * blocks :]
        step = _step(self.block)
        for start in range(0, count, step):
            stop = min(start + step, count)
            codes = unpack_bits(data[start // 4 : packed_size(stop, 2)], stop - start, 2)
            first, (full, rest) = start // self.block, divmod(stop - start, self.block)
            high = (codes & 1).view(np.bool_)
            values = np.empty(stop - start, dtype=np.float32)
            body = values.size - rest
            lower, upper = pairs[first : first + full].T
            values[:body] = np.where(
                high[:body].reshape(full, self.block), upper[:, None], lower[:, None]
            ).reshape(-1)
            if rest:
                values[body:] = np.where(high[body:], pairs[-1, 1], pairs[-1, 0])
            signs = (codes >> np.uint8(1)).astype(np.uint32) << np.uint32(31)
            values.view(np.uint32)[:] ^= signs
            yield start, values
