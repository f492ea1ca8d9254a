"""What a blob says about itself, read without loading torch.

The blobs are those of ``flower_geo.compression.Codec.encode``.  ``Codec.inspect``
would check every byte (the frames' own checksums have done that) and needs torch;
the first bytes are enough here.  Anything else travels as plain bytes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from flower_geo.calls import MAX_NAME
from flower_geo.errors import FrameRefused
from flower_geo.transport import split_pb2 as pb

__all__ = ["BlobHeader", "check_header", "describe"]

_FIXED = struct.Struct("<4sIBBB")
_MAGIC = b"GEO\x01"
_DTYPES = ("float32", "bfloat16", "float16", "float64")
#: Bytes a header takes at most: the fixed part, the codec's name, 16 dimensions.
MAX_HEADER = _FIXED.size + 255 + 16 * 8
MAX_DIMENSIONS, MAX_VALUES = 16, 2**40
#: Values that one byte of a coded tensor may stand for.
MAX_VALUES_PER_BYTE = 4096


@dataclass(frozen=True)
class BlobHeader:
    """What is known of a blob before its bytes are there.

    Attributes:
        name: its name in the call.
        dtype: of the tensor before encoding; ``bytes`` if it is no tensor.
        shape: of the tensor; the number of bytes if it is none.
        codec: the codec it was written with; "" if it is no tensor.
        total: its length in bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    codec: str
    total: int

    def message(self) -> pb.Blob:
        """As it travels."""
        return pb.Blob(
            name=self.name, dtype=self.dtype, shape=self.shape, codec=self.codec, total=self.total
        )


def describe(name: str, total: int, begin: bytes) -> BlobHeader:
    """The header of a blob of ``total`` bytes that begins so (``MAX_HEADER`` bytes are enough)."""
    plain = BlobHeader(name, "bytes", (total,), "", total)
    if len(begin) < _FIXED.size or begin[:4] != _MAGIC:
        return plain
    _, _, dtype, dimensions, length = _FIXED.unpack_from(begin)
    start = _FIXED.size + length
    if dtype >= len(_DTYPES) or dimensions > MAX_DIMENSIONS or len(begin) < start + 8 * dimensions:
        return plain
    codec = begin[_FIXED.size : start]
    if not codec.isascii():
        return plain
    shape = struct.unpack_from(f"<{dimensions}Q", begin, start)
    return BlobHeader(name, _DTYPES[dtype], shape, codec.decode(), total)


def check_header(found: pb.Blob) -> BlobHeader:
    """A header that came from the other end.

    Raises:
        FrameRefused: it claims what no blob of that length can be.
    """
    header = BlobHeader(found.name, found.dtype, tuple(found.shape), found.codec, found.total)
    if not 0 < len(header.name) <= MAX_NAME or not header.name.isprintable():
        raise FrameRefused(f"{header.name[:40]!r} is no name for a blob")
    if len(header.shape) > MAX_DIMENSIONS or len(header.codec) > 255:
        raise FrameRefused(f"blob {header.name!r} has {len(header.shape)} dimensions")
    if header.dtype == "bytes":
        possible = header.shape == (header.total,) and not header.codec
    else:
        values = math.prod(max(size, 1) for size in header.shape)
        most = min(MAX_VALUES, header.total * MAX_VALUES_PER_BYTE)
        possible = header.dtype in _DTYPES and values <= most
    if not possible:
        raise FrameRefused(
            f"blob {header.name!r} of {header.total} bytes cannot be a "
            f"{header.dtype[:20]} of shape {list(header.shape)}"
        )
    return header
