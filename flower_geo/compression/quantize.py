"""Value codecs: how a run of fp32 values becomes bytes.

Each has an exact size for a given number of values, so that a decoder can
check a payload before it allocates anything, and decodes piece by piece, so
that accumulating never needs a dense copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from flower_geo.compression.bits import pack_bits, packed_size, unpack_bits

__all__ = ["BF16", "FP16", "FP32", "Int", "Int2", "ValueCodec"]

Floats = NDArray[np.float32]

#: Values decoded at a time: 1 MiB of fp32, which stays in the cache.
PIECE = 1 << 18

_ZERO, _HALF = np.float32(0.0), np.float32(0.5)
_TINY = np.nextafter(_ZERO, np.float32(1.0))  # smallest positive fp32


def _step(block: int) -> int:
    """Values in a piece of whole blocks that begins at a whole byte."""
    return max(1, PIECE // (4 * block)) * 4 * block


def _rows(values: Floats, block: int) -> Iterator[tuple[int, int, Floats]]:
    """Yield ``(start, stop, rows)``: copies of pieces, a row a block, zeros after the end."""
    step = _step(block)
    for start in range(0, values.size, step):
        stop = min(start + step, values.size)
        width = min(block, stop - start)
        rows = np.zeros((-(-(stop - start) // width), width), dtype=np.float32)
        rows.reshape(-1)[: stop - start] = values[start:stop]
        yield start, stop, rows


class ValueCodec(Protocol):
    """Encodes a flat fp32 array."""

    name: ClassVar[str]
    lossless: ClassVar[bool]

    @property
    def spec(self) -> str:
        """Canonical spec."""

    def size(self, count: int) -> int:
        """Exact payload bytes for ``count`` values."""

    def encode(self, values: Floats) -> bytes:
        """Payload of finite values."""

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Yield ``(start, values)`` in order; ``payload`` has the exact size."""


@dataclass(frozen=True)
class FP32:
    """Raw little-endian fp32; lossless."""

    name: ClassVar[str] = "fp32"
    lossless: ClassVar[bool] = True
    spec: ClassVar[str] = "fp32"

    def size(self, count: int) -> int:
        """4 bytes a value."""
        return 4 * count

    def encode(self, values: Floats) -> bytes:
        """Copy."""
        return values.astype("<f4", copy=False).tobytes()

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Views of the payload."""
        every = np.frombuffer(payload, dtype="<f4")
        for start in range(0, count, PIECE):
            yield start, every[start : start + PIECE]


@dataclass(frozen=True)
class BF16:
    """Round to nearest even bfloat16; values beyond its range become its largest."""

    name: ClassVar[str] = "bf16"
    lossless: ClassVar[bool] = False
    spec: ClassVar[str] = "bf16"

    def size(self, count: int) -> int:
        """2 bytes a value."""
        return 2 * count

    def encode(self, values: Floats) -> bytes:
        """Round and clamp."""
        rounded = torch.from_numpy(np.ascontiguousarray(values)).to(torch.bfloat16)
        largest = torch.finfo(torch.bfloat16).max
        return rounded.clamp_(-largest, largest).view(torch.int16).numpy().tobytes()

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """The upper half of an fp32."""
        every = np.frombuffer(payload, dtype="<u2")
        for start in range(0, count, PIECE):
            half = every[start : start + PIECE].astype(np.uint32)
            yield start, (half << np.uint32(16)).view(np.float32)


@dataclass(frozen=True)
class FP16:
    """IEEE half precision under one power-of-two scale a tensor.

    The scale puts the largest value near the top of the range: nothing
    overflows, and the values of a tiny tensor do not vanish.
    """

    name: ClassVar[str] = "fp16"
    lossless: ClassVar[bool] = False
    spec: ClassVar[str] = "fp16"

    def size(self, count: int) -> int:
        """2 bytes a value and the scale."""
        return 4 + 2 * count

    def encode(self, values: Floats) -> bytes:
        """Scale, which is exact, then round."""
        largest = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))
        exponent = math.ceil(math.log2(largest / 65504.0)) if largest else 0
        exponent = max(exponent, -126)  # a denormal scale would not be exact
        # 32768 times 2**113 is beyond fp32: the next smaller half is the top there.
        top = 65504.0 if exponent < 113 else 32752.0
        scale = np.float32(2.0**exponent)
        half = torch.from_numpy(values / scale).clamp_(-top, top).to(torch.float16)
        payload: bytes = scale.astype("<f4").tobytes() + half.numpy().tobytes()
        return payload

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Widen and scale back."""
        scale = np.frombuffer(payload[:4], dtype="<f4")[0]
        every = np.frombuffer(payload[4:], dtype="<f2")
        for start in range(0, count, PIECE):
            with np.errstate(over="ignore", invalid="ignore"):
                yield start, every[start : start + PIECE].astype(np.float32) * scale


@dataclass(frozen=True)
class Int:
    """Symmetric integers of 8 or 4 bits under one fp32 scale a block (absmax).

    An outlier costs precision in its own block only.
    """

    bits: int
    block: int
    lossless: ClassVar[bool] = False
    name: ClassVar[str] = "int"

    @property
    def spec(self) -> str:
        """``int8(block=256)``."""
        return f"int{self.bits}(block={self.block})"

    @property
    def top(self) -> int:
        """Largest code: 127 or 7."""
        return (1 << (self.bits - 1)) - 1

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def size(self, count: int) -> int:
        """Scales, then codes."""
        return 4 * self._blocks(count) + packed_size(count, self.bits)

    def encode(self, values: Floats) -> bytes:
        """Round to the nearest code."""
        count, top = values.size, np.float32(self.top)
        scales = np.empty(self._blocks(count), dtype="<f4")
        codes = np.empty(count, dtype=np.int8)
        for start, stop, rows in _rows(values, self.block):
            largest = np.maximum(rows.max(axis=1), -rows.min(axis=1))
            # A zero block may have any scale; that of a denormal block is coarse
            # and rounded up, that of a huge one is kept from decoding to infinity.
            scale = np.maximum(largest / top, _TINY)
            with np.errstate(over="ignore"):
                scale = np.where(largest > scale * (top + _HALF), scale + _TINY, scale)
                scale = np.where(np.isinf(scale * top), np.nextafter(scale, _ZERO), scale)
            scales[start // self.block :][: scale.size] = scale
            rows = np.rint(np.divide(rows, scale[:, None], out=rows), out=rows)
            codes[start:stop] = np.clip(rows, -top, top, out=rows).reshape(-1)[: stop - start]
        if self.bits != 8:
            return scales.tobytes() + pack_bits(
                (codes + np.int8(self.top)).view(np.uint8), self.bits
            )
        return scales.tobytes() + codes.tobytes()

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Code times scale, in fp32."""
        blocks = self._blocks(count)
        scales = np.frombuffer(payload[: 4 * blocks], dtype="<f4")
        data = payload[4 * blocks :]
        step = _step(self.block)
        for start in range(0, count, step):
            stop = min(start + step, count)
            part = data[start * self.bits // 8 : packed_size(stop, self.bits)]
            if self.bits == 8:
                codes = np.frombuffer(part, dtype=np.int8).astype(np.float32)
            else:
                codes = unpack_bits(part, stop - start, self.bits).astype(np.float32)
                codes -= np.float32(self.top)
            first, (whole, rest) = start // self.block, divmod(stop - start, self.block)
            with np.errstate(over="ignore", invalid="ignore"):
                rows = codes[: codes.size - rest].reshape(whole, self.block)
                rows *= scales[first : first + whole, None]
                if rest:
                    codes[codes.size - rest :] *= scales[first + whole]
            yield start, codes


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
        count = values.size
        pairs = np.empty((self._blocks(count), 2), dtype=np.float32)
        codes = np.empty(count, dtype=np.uint8)
        for start, stop, signed in _rows(values, self.block):
            rows = np.abs(signed).astype(np.float64)
            real = np.full(len(rows), self.block)
            real[-1] = stop - start - (len(rows) - 1) * self.block
            high = rows > (rows.sum(axis=1) / real)[:, None]
            above = high.sum(axis=1)
            here = pairs[start // self.block :][: len(rows)]
            here[:, 1] = (rows * high).sum(axis=1) / np.maximum(above, 1)
            here[:, 0] = (rows * ~high).sum(axis=1) / np.maximum(real - above, 1)
            bits = high.view(np.uint8) | ((signed < 0).view(np.uint8) << np.uint8(1))
            codes[start:stop] = bits.reshape(-1)[: stop - start]
        return BF16().encode(pairs.reshape(-1)) + pack_bits(codes, 2)

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Sign times magnitude."""
        blocks = self._blocks(count)
        pairs = np.concatenate(
            [values for _, values in BF16().pieces(payload[: 4 * blocks], 2 * blocks)]
            or [np.zeros(0, dtype=np.float32)]
        ).reshape(blocks, 2)
        data = payload[4 * blocks :]
        step = _step(self.block)
        for start in range(0, count, step):
            stop = min(start + step, count)
            codes = unpack_bits(data[start // 4 : packed_size(stop, 2)], stop - start, 2)
            first, (whole, rest) = start // self.block, divmod(stop - start, self.block)
            high = (codes & 1).view(np.bool_)
            values = np.empty(stop - start, dtype=np.float32)
            body = values.size - rest
            lower, upper = pairs[first : first + whole].T
            values[:body] = np.where(
                high[:body].reshape(whole, self.block), upper[:, None], lower[:, None]
            ).reshape(-1)
            if rest:
                values[body:] = np.where(high[body:], pairs[-1, 1], pairs[-1, 0])
            signs = (codes >> np.uint8(1)).astype(np.uint32) << np.uint32(31)
            values.view(np.uint32)[:] ^= signs
            yield start, values
