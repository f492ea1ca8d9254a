"""Keeping random values: 8 bytes say which, because both ends draw the same ones."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from flower_geo.compression.floats import Floats
from flower_geo.compression.sparsify import Indices

__all__ = ["Drawn", "RandK"]

#: Indices drawn at a time.
_PIECE = 1 << 16


@runtime_checkable
class Drawn(Protocol):
    """A selection whose indices are not sent: a short head is, from which they are drawn again."""

    @property
    def spec(self) -> str:
        """Canonical spec."""

    def kept(self, count: int) -> int:
        """Values kept of ``count``."""

    def index_size(self, count: int) -> int:
        """Exact bytes of the head."""

    def draw(self, values: Floats) -> tuple[bytes, Indices, Floats]:
        """Head, flat indices kept (ascending), and the values to send for them."""

    def unpack(self, data: memoryview, count: int) -> Indices:
        """The indices that belong to a head."""


@dataclass(frozen=True)
class RandK:
    """A random ``density`` share of the values, another one for each message.

    The n values, as a ring turned by a random offset, are cut into k runs of
    equal length, and each run sends one of its values: every value is sent with
    probability k/n, so that ``E|x - C(x)|^2 = (1 - k/n) |x|^2`` as for a plain
    random subset (Stich et al. 2018, arXiv:1809.07599), at the cost of k draws
    where a subset takes n.

    Offset and draws come from Philox (Salmon et al. 2011), whose stream is the
    same on every platform, under the seed and a salt.  The salt is a hash of the
    values: encoding a tensor again, as after a resume, gives the same bytes.

    Attributes:
        density: share kept, above 0 and at most 1.
        seed: sites with different seeds keep different places of equal tensors.
        scale: send values times n/k, so that the decoded tensor's expectation is
            the tensor.  Not for use with error feedback, which wants a contraction.
    """

    density: float
    seed: int = 0
    scale: bool = False

    @property
    def spec(self) -> str:
        """``randk(density=0.1,seed=0)``."""
        scale = ",scale=true" if self.scale else ""
        return f"randk(density={self.density!r},seed={self.seed}{scale})"

    def kept(self, count: int) -> int:
        """Values kept of ``count``."""
        return min(count, max(1, round(self.density * count))) if count else 0

    def index_size(self, count: int) -> int:
        """The salt: 8 bytes."""
        return 8

    def draw(self, values: Floats) -> tuple[bytes, Indices, Floats]:
        """Salt, indices, values.

        With ``scale``, values that exceed fp32 come out infinite; the caller refuses them.
        """
        salt = hashlib.blake2b(values.astype("<f4", copy=False).data, digest_size=8).digest()
        indices = self._indices(salt, values.size)
        kept = values[indices]
        if self.scale and kept.size:
            with np.errstate(over="ignore"):
                kept *= np.float32(values.size / kept.size)
        return salt, indices, kept

    def unpack(self, data: memoryview, count: int) -> Indices:
        """Drawn again from the salt."""
        return self._indices(bytes(data), count)

    def _indices(self, salt: bytes, count: int) -> Indices:
        kept = self.kept(count)
        out = np.empty(kept, dtype=np.int64)
        if not kept:
            return out
        # The first ``longer`` runs have one value more than the others.
        length, longer = divmod(count, kept)
        stream = np.random.Philox(key=int.from_bytes(salt, "little") << 64 | self.seed)
        offset = int(stream.random_raw()) % count
        for first in range(0, kept, _PIECE):
            run = np.arange(first, min(first + _PIECE, kept), dtype=np.int64)
            width = (length + (run < longer)).astype(np.uint64)
            within = (stream.random_raw(run.size) % width).astype(np.int64)
            out[first : first + run.size] = run * length + np.minimum(run, longer) + within
        out += offset
        # What went past the end of the ring begins it.
        split = int(np.searchsorted(out, count))
        out[split:] -= count
        return np.roll(out, kept - split)
