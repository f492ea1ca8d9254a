"""Value codecs of floating point, and what a value codec is.

Each has an exact size for a given number of values, so that a decoder can
check a payload before it allocates anything, and decodes piece by piece, so
that accumulating never needs a dense copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_geo.compression.buffers import blank
from flower_geo.errors import CodecError, NonFiniteTensor

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "PIECE",
    "SCALES",
    "AddsTo",
    "Bytes",
    "Floats",
    "ValueCodec",
    "Writes",
    "Zero",
    "finite",
    "whole",
    "written",
]

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

#: Values coded at a time: 1 MiB of fp32, which stays in the cache.
PIECE = 1 << 18


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


@runtime_checkable
class Writes(Protocol):
    """A value codec that writes its payload where it is told to, and needs no copy."""

    def write(self, values: Floats, out: Bytes) -> bool:
        """Fill ``out``, of the payload's size; False where a value is not finite."""


@runtime_checkable
class AddsTo(Protocol):
    """A value codec that adds what it decodes without handing it out."""

    def add_to(self, payload: memoryview, count: int, out: Tensor, weight: float) -> None:
        """Add ``weight`` times the ``count`` values to flat ``out``, fp32 or fp64.

        Raises:
            CorruptPayload: a value is not finite; ``out`` may then hold a part.
        """


class _Sized(Writes, Protocol):
    def size(self, count: int) -> int: ...


def written(codec: _Sized, values: Floats) -> bytes:
    """The payload that a codec writes.

    Raises:
        NonFiniteTensor: a value is NaN or infinity.
    """
    owner, out = blank(codec.size(values.size))
    if not codec.write(values, out):
        raise NonFiniteTensor("values to encode hold NaN or infinity")
    del out
    return owner.getvalue()


def whole(codec: ValueCodec, payload: memoryview, count: int) -> Floats:
    """All values of a payload together, in memory of their own."""
    pieces = (values for _, values in codec.pieces(payload, count))
    return np.concatenate([np.zeros(0, dtype=np.float32), *pieces])


def finite(values: Floats) -> bool:
    """Whether there is neither NaN nor infinity; both survive in a sum.

    A sum of finite values can overflow, so then each is looked at.
    """
    for start in range(0, values.size, PIECE):
        piece = values[start : start + PIECE]
        with np.errstate(over="ignore", invalid="ignore"):
            total = float(torch.from_numpy(piece).sum() if piece.flags.writeable else piece.sum())
        if not (math.isfinite(total) or np.isfinite(piece).all()):
            return False
    return True


@dataclass(frozen=True)
class Zero:
    """Nothing: all values are zero.

    No user names it.  An encoder takes it for a tensor without any other value, such as
    the update of a tensor that was not trained.
    """

    name: ClassVar[str] = "zero"
    lossless: ClassVar[bool] = True
    spec: ClassVar[str] = "zero"

    def size(self, count: int) -> int:
        """None."""
        return 0

    def encode(self, values: Floats) -> bytes:
        """No bytes; ``CodecError`` where a value is not zero."""
        if values.any():
            raise CodecError("codec zero takes zeros only; name another one")
        return b""

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Zeros."""
        for start in range(0, count, PIECE):
            yield start, np.zeros(min(PIECE, count - start), dtype=np.float32)


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
        return written(self, values)

    def write(self, values: Floats, out: Bytes) -> bool:
        """Copy."""
        for start in range(0, values.size, PIECE):
            piece = values[start : start + PIECE]
            if not finite(piece):
                return False
            raw = np.ascontiguousarray(piece).astype("<f4", copy=False).view(np.uint8)
            out[4 * start : 4 * start + raw.size] = raw
        return True

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
        return written(self, values)

    def write(self, values: Floats, out: Bytes) -> bool:
        """Round and clamp."""
        largest = torch.finfo(torch.bfloat16).max
        for start in range(0, values.size, PIECE):
            piece = np.require(values[start : start + PIECE], requirements=["C", "W"])
            if not finite(piece):
                return False
            half = torch.from_numpy(piece).to(torch.bfloat16).clamp_(-largest, largest)
            raw = half.view(torch.int16).numpy().astype("<i2", copy=False).view(np.uint8)
            out[2 * start : 2 * start + raw.size] = raw
        return True

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """The upper half of an fp32."""
        every = np.frombuffer(payload, dtype="<i2")
        for start in range(0, count, PIECE):
            half = torch.from_numpy(every[start : start + PIECE].astype(np.int16))
            yield start, half.view(torch.bfloat16).to(torch.float32).numpy()


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
        return written(self, values)

    def write(self, values: Floats, out: Bytes) -> bool:
        """Scale, which is exact, then round."""
        # NaN survives both; whether the smallest or the largest is infinite is seen too.
        largest = max(float(values.max(initial=0.0)), -float(values.min(initial=0.0)))
        if not math.isfinite(largest):
            return False
        exponent = math.ceil(math.log2(largest / 65504.0)) if largest else 0
        exponent = max(exponent, -126)  # a denormal scale would not be exact
        # 32768 times 2**113 is beyond fp32: the next smaller half is the top there.
        top = 65504.0 if exponent < 113 else 32752.0
        scale = np.float32(2.0**exponent)
        out[:4] = np.array([scale], dtype="<f4").view(np.uint8)
        for start in range(0, values.size, PIECE):
            piece = torch.from_numpy(values[start : start + PIECE] / scale)
            half = piece.clamp_(-top, top).to(torch.float16).numpy()
            raw = half.astype("<f2", copy=False).view(np.uint8)
            out[4 + 2 * start : 4 + 2 * start + raw.size] = raw
        return True

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Widen and scale back."""
        scale = np.frombuffer(payload[:4], dtype="<f4")[0]
        every = np.frombuffer(payload[4:], dtype="<f2")
        for start in range(0, count, PIECE):
            half = torch.from_numpy(every[start : start + PIECE].astype(np.float16))
            yield start, half.to(torch.float32).mul_(float(scale)).numpy()


#: How the scales of blocks are stored, by the name a spec gives it.
SCALES: dict[str, FP32 | BF16] = {"fp32": FP32(), "bf16": BF16()}
