"""Packing a payload without loss: byte planes, a zstd frame each.

Sign and exponent of neighbouring values are much alike, the last bits of their
mantissas are noise.  So a payload is sorted into planes, all first bytes of its
numbers, then all second ones, and every plane of at most 256 KiB is a frame of
its own: a plane of noise is stored as it is, and spoils no other one's statistics.

    length of every frame, u32 each | frames

Sizes and number of planes follow from the sections of the payload, which follow
from spec and shape.  A frame that is as long as its plane is the plane itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import zstandard
from numpy.typing import NDArray

from flower_geo.compression.bits import packed_size
from flower_geo.compression.floats import BF16, FP16, FP32, ValueCodec
from flower_geo.compression.integers import Int, Int2
from flower_geo.compression.sign import Sign
from flower_geo.errors import CorruptPayload

__all__ = ["Packer", "Section", "Zstd", "sections_of"]

#: Bytes of a payload and the width of the numbers in them.
Section = tuple[int, int]
#: Longest plane: more than zstd's block, far less than a decoder minds to hold.
_PLANE = 1 << 18


@runtime_checkable
class Packer(Protocol):
    """The last stage of a chain: shrinks a payload whose size a decoder knows."""

    @property
    def spec(self) -> str:
        """Canonical spec."""

    def fewest(self, sections: Sequence[Section]) -> int:
        """Bytes that no packed payload of these sections is shorter than."""

    def pack(self, payload: memoryview, sections: Sequence[Section]) -> list[bytes]:
        """Parts of the packed payload; the caller keeps the plain one if that is shorter."""

    def unpack(self, data: memoryview, sections: Sequence[Section]) -> tuple[memoryview, int]:
        """The payload, and how many bytes of ``data`` it was made of.

        Raises:
            CorruptPayload: ``data`` holds anything but a payload of these sections.
        """


def sections_of(values: ValueCodec, count: int) -> list[Section]:
    """How the payload of ``count`` values is made up.

    Part of the format: a decoder must sort the bytes back in the same way.
    Payloads of a user's own codec are single bytes.
    """
    size = values.size(count)
    if isinstance(values, FP32):
        return [(size, 4)]
    if isinstance(values, BF16):
        return [(size, 2)]
    if isinstance(values, FP16):
        return [(4, 4), (size - 4, 2)]
    if isinstance(values, Int | Int2 | Sign):
        bits = 1 if isinstance(values, Sign) else values.bits
        codes, blocks = packed_size(count, bits), -(-count // values.block)
        return [(size - codes, max(1, (size - codes) // max(1, blocks))), (codes, 1)]
    return [(size, 1)]


def _planes(sections: Sequence[Section]) -> Iterator[slice]:
    """Where the bytes of each plane lie in the payload."""
    start = 0
    for nbytes, width in sections:
        for first in range(start, start + nbytes, width * _PLANE):
            stop = min(first + width * _PLANE, start + nbytes)
            yield from (slice(first + place, stop, width) for place in range(width))
        start += nbytes


def _length(plane: slice) -> int:
    return len(range(plane.start, plane.stop, plane.step))


@dataclass(frozen=True)
class Zstd:
    """Zstandard over byte planes.

    Attributes:
        level: 1 (fast) to 19 (small).
    """

    level: int

    @property
    def spec(self) -> str:
        """``zstd(level=3)``."""
        return f"zstd(level={self.level})"

    def fewest(self, sections: Sequence[Section]) -> int:
        """A length and a byte for each plane."""
        return 5 * sum(width * -(-nbytes // (width * _PLANE)) for nbytes, width in sections)

    def pack(self, payload: memoryview, sections: Sequence[Section]) -> list[bytes]:
        """Lengths, then frames or planes."""
        compressor = zstandard.ZstdCompressor(level=self.level)
        raw = np.frombuffer(payload, dtype=np.uint8)
        parts, lengths = [b""], []
        for where in _planes(sections):
            plane = raw[where].tobytes()
            frame = compressor.compress(plane)
            parts.append(frame if len(frame) < len(plane) else plane)
            lengths.append(len(parts[-1]))
        parts[0] = np.array(lengths, dtype="<u4").tobytes()
        return parts

    def unpack(self, data: memoryview, sections: Sequence[Section]) -> tuple[memoryview, int]:
        """Each frame must declare exactly its plane's size, which is what is allocated for it."""
        planes = self.fewest(sections) // 5
        if len(data) < 5 * planes:
            raise CorruptPayload(f"a zstd payload of {planes} planes has {len(data)} bytes")
        lengths = np.frombuffer(data[: 4 * planes], dtype="<u4")
        used = 4 * planes + int(lengths.sum(dtype=np.uint64))
        if used > len(data):
            raise CorruptPayload(f"a zstd payload says {used} bytes and has {len(data)}")
        out = np.empty(sum(nbytes for nbytes, _ in sections), dtype=np.uint8)
        start = 4 * planes
        for where, length in zip(_planes(sections), lengths.tolist(), strict=True):
            out[where] = _plane(data[start : start + length], _length(where))
            start += length
        return out.data, used


def _plane(frame: memoryview, size: int) -> NDArray[np.uint8]:
    """The ``size`` bytes that a frame holds."""
    if len(frame) == size:
        return np.frombuffer(frame, dtype=np.uint8)
    if len(frame) > size:
        raise CorruptPayload(f"a zstd frame of {len(frame)} bytes holds a plane of {size}")
    try:
        head = zstandard.get_frame_parameters(frame)
        if (head.content_size, head.dict_id) != (size, 0) or head.window_size > max(size, 1024):
            raise CorruptPayload(f"a zstd frame does not declare the {size} bytes of its plane")
        plane = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        line = " ".join(str(error).split())[:120]
        raise CorruptPayload(f"a zstd frame cannot be read: {line}") from None
    if len(plane) != size:
        raise CorruptPayload(f"a zstd frame holds {len(plane)} bytes, not {size}")
    return np.frombuffer(plane, dtype=np.uint8)
