"""Random numbers for stochastic rounding that every machine draws alike."""

from __future__ import annotations

import hashlib

import numpy as np

from flower_geo.compression.floats import Floats

__all__ = ["Dither"]


class Dither:
    """Uniform numbers in (0, 1), 16 bits each: the i-th belongs to the i-th value.

    They come from Philox (Salmon et al. 2011), whose stream is the same on every
    platform, keyed by the seed and a hash of the values: the same tensor gets
    the same numbers again, as after a resume, and any other tensor others.

    ``floor(x + u)`` of these numbers is unbiased but for 2**-17, and leaves a
    whole x below 128 as it is, because ``x + u`` is then exact in fp32.

    Args:
        seed: 0 to 2**64 - 1.
        values: what is to be rounded.
    """

    def __init__(self, seed: int, values: Floats) -> None:
        source = np.ascontiguousarray(values).astype("<f4", copy=False)
        digest = hashlib.sha256(source.data).digest()
        self._stream = np.random.Philox(key=int.from_bytes(digest[:8], "little") << 64 | seed)

    def draw(self, count: int) -> Floats:
        """The next ``count`` numbers; a multiple of 4 but for the last call."""
        words = self._stream.random_raw(-(-count // 4)).astype("<u8", copy=False)
        numbers = words.view("<u2")[:count].astype(np.float32)
        numbers += np.float32(0.5)
        numbers *= np.float32(2.0**-16)
        return numbers
