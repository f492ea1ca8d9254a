"""One bit a value: its sign, under the mean magnitude of its block."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from flower_geo.compression.bits import packed_size
from flower_geo.compression.floats import BF16, FP32, PIECE, SCALES, Floats, whole

__all__ = ["Sign"]


@dataclass(frozen=True)
class Sign:
    """Scaled signs (EF-signSGD, Karimireddy et al. 2019, arXiv:1901.09847).

    Of a block x of d values it keeps ``(|x|_1 / d) * sign(x)``, which loses
    exactly ``|x|_2^2 - |x|_1^2 / d`` before the mean is rounded.  That is less
    than all of it but a lot: meant for use with error feedback.  Zeros count as
    positive, a block of zeros decodes to zeros.

    Attributes:
        block: values under one mean.
        scale: how the mean is stored, ``bf16`` or ``fp32``.
    """

    block: int
    scale: str = "bf16"
    name: ClassVar[str] = "sign"
    lossless: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        """``sign(block=256)``; bf16 means go without saying."""
        return f"sign(block={self.block}{'' if self.scale == 'bf16' else ',scale=fp32'})"

    @property
    def means(self) -> BF16 | FP32:
        """The codec of the means."""
        return SCALES[self.scale]

    def means_size(self, count: int) -> int:
        """Bytes of the means, which come first."""
        return self.means.size(-(-count // self.block))

    def size(self, count: int) -> int:
        """Means, then signs."""
        return self.means_size(count) + packed_size(count, 1)

    @property
    def _step(self) -> int:
        """Values in a piece of whole blocks that begins at a whole byte."""
        unit = math.lcm(self.block, 8)
        return max(1, PIECE // unit) * unit

    def encode(self, values: Floats) -> bytes:
        """Means and signs."""
        means, signs = [], []
        for start in range(0, values.size, self._step):
            part = values[start : start + self._step]
            size = np.abs(part)
            body = part.size - part.size % self.block
            found = size[:body].reshape(-1, self.block).mean(axis=1, dtype=np.float64)
            if body < part.size:
                found = np.append(found, size[body:].mean(dtype=np.float64))
            means.append(self.means.encode(found.astype(np.float32)))
            # No sign under a mean of zero: -0.0 would not come out as it went in.
            rounded = whole(self.means, memoryview(means[-1]), found.size)
            some = np.repeat(rounded != 0, self.block)[: part.size]
            signs.append(np.packbits((part < 0) & some, bitorder="little").tobytes())
        return b"".join(means + signs)

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, Floats]]:
        """Sign times mean."""
        split = self.means_size(count)
        means = whole(self.means, payload[:split], -(-count // self.block))
        data = np.frombuffer(payload[split:], dtype=np.uint8)
        for start in range(0, count, self._step):
            stop = min(start + self._step, count)
            first, last = start // self.block, -(-stop // self.block)
            values = np.repeat(means[first:last], self.block)[: stop - start]
            part = data[start // 8 : packed_size(stop, 1)]
            bits = np.unpackbits(part, count=stop - start, bitorder="little")
            values.view(np.uint32)[:] ^= bits.astype(np.uint32) << np.uint32(31)
            yield start, values
