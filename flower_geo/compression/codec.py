"""Codecs: immutable values that turn one tensor into one self-describing blob.

    magic "GEO" 0x01 | crc32 of the rest u32 | dtype u8 | dimensions u8 | spec length u8
    | spec, ASCII | dimensions, u64 each | payload

All integers little-endian.  The size of a payload follows from the spec and the
shape alone, so a decoder compares lengths before it allocates; nothing in a
blob is ever trusted to say how large something is.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_geo.compression.quantize import FP32, ValueCodec
from flower_geo.compression.sparsify import Selection
from flower_geo.errors import CodecError, CodecSpecError, CorruptPayload, NonFiniteTensor

__all__ = ["BlobInfo", "Codec"]

MAGIC = b"GEO\x01"
_FIXED = struct.Struct("<4sIBBB")
_DTYPES = {
    0: torch.float32, 1: torch.bfloat16, 2: torch.float16, 3: torch.float64,
}  # fmt: skip
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
#: Dimensions and values no tensor of a model exceeds.
MAX_DIMENSIONS, MAX_VALUES = 16, 2**40
#: Values a payload byte may stand for where the receiver states no shape: zeros
#: that top-k leaves out cost nothing to claim.
MAX_VALUES_PER_BYTE = 4096


@dataclass(frozen=True)
class BlobInfo:
    """What a blob's header says.

    Attributes:
        spec: the codec it was written with.
        shape: the tensor's shape.
        dtype: the tensor's dtype before encoding.
        nbytes: length of the blob, header included.
    """

    spec: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int


@dataclass(frozen=True)
class Codec:
    """A chain: optionally keep the largest values, then code the values.

    Attributes:
        values: the value codec.
        sparse: the selection before it, if any.
    """

    values: ValueCodec
    sparse: Selection | None = None

    @property
    def spec(self) -> str:
        """The canonical spec string."""
        return self.values.spec if self.sparse is None else f"{self.sparse.spec}|{self.values.spec}"

    @property
    def lossless(self) -> bool:
        """Whether decoding gives every finite fp32 back to the bit."""
        return self.sparse is None and self.values.lossless

    def for_tensor(self, name: str) -> Codec:
        """The codec for a tensor of this name: itself."""
        return self

    def payload_size(self, count: int) -> int:
        """Exact payload bytes for ``count`` values."""
        if self.sparse is None:
            return self.values.size(count)
        return self.sparse.index_size(count) + self.values.size(self.sparse.kept(count))

    def encode(self, tensor: Tensor, name: str = "") -> bytes:
        """Encode a floating-point tensor of any shape, strides or device.

        A tensor that this codec would make larger than raw fp32 is stored as
        raw fp32 instead; the blob's own spec says so.

        Args:
            tensor: fp32, bf16, fp16 or fp64 (which is rounded to fp32).
            name: named in errors.

        Raises:
            NonFiniteTensor: it holds NaN or infinity.
            CodecError: it is not of floating point.
        """
        if tensor.dtype not in _CODES:
            raise CodecError(
                f"tensor {name or 'to encode'} is {tensor.dtype}, not floating point; "
                "only parameters, activations and their gradients are sent"
            )
        source, shape = tensor.dtype, tuple(tensor.shape)
        if len(shape) > MAX_DIMENSIONS:
            raise CodecError(
                f"tensor {name or 'to encode'} has {len(shape)} dimensions; "
                f"reshape it to at most {MAX_DIMENSIONS}"
            )
        flat = tensor.detach().to("cpu", torch.float32).contiguous().view(-1).numpy()
        if not np.isfinite(flat).all():
            raise NonFiniteTensor(
                f"tensor {name or 'to encode'} holds NaN or infinity; it is not sent"
            )
        chosen = self
        if self.payload_size(flat.size) >= 4 * flat.size:
            chosen = Codec(FP32())
        return _assemble(chosen.spec, shape, source, chosen._payload(flat))

    def _payload(self, flat: NDArray[np.float32]) -> bytes:
        if self.sparse is None:
            return self.values.encode(flat)
        indices = self.sparse.select(flat)
        return self.sparse.pack(indices, flat.size) + self.values.encode(flat[indices])

    @staticmethod
    def inspect(blob: bytes | memoryview) -> BlobInfo:
        """Read and check a blob's header and checksum.

        Raises:
            CorruptPayload: it is no blob, or was cut or changed.
        """
        return _open(blob)[0]

    @staticmethod
    def decode(
        blob: bytes | memoryview,
        dtype: torch.dtype = torch.float32,
        shape: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Decode a blob on the CPU; the same bits on every call and machine.

        Args:
            blob: what :meth:`encode` gave.
            dtype: dtype of the result.
            shape: refuse any other shape, before anything is allocated.  Without
                it, a blob that claims more than 4096 values a byte is refused.

        Raises:
            CorruptPayload: the blob is damaged or hostile, or of another shape.
        """
        info, codec, payload = _open(blob, shape)
        count = math.prod(info.shape)
        if shape is None and count > MAX_VALUES_PER_BYTE * len(payload):
            raise CorruptPayload(
                f"a blob claims {count} values in {len(payload)} bytes; say which shape it has"
            )
        out = (np.empty if codec.sparse is None else np.zeros)(count, dtype=np.float32)
        for where, values in codec._runs(payload, count):
            out[where] = values
        return torch.from_numpy(out).view(info.shape).to(dtype)

    @staticmethod
    def add_into(blob: bytes | memoryview, out: Tensor, weight: float = 1.0) -> None:
        """Add ``weight`` times the decoded tensor to ``out``, a piece at a time.

        Args:
            blob: what :meth:`encode` gave, of ``out``'s shape.
            out: contiguous fp32 or fp64 CPU tensor, changed in place.
            weight: factor.

        Raises:
            CorruptPayload: as :meth:`decode`; ``out`` may then hold a part.
            CodecError: ``out`` is of another dtype or device, or not contiguous, or
                the weight is not finite.
        """
        if not math.isfinite(weight):
            raise CodecError(f"add_into cannot weight by {weight}")
        kind = (out.dtype in (torch.float32, torch.float64), out.device.type, out.is_contiguous())
        if kind != (True, "cpu", True):
            raise CodecError(
                f"add_into needs a contiguous fp32 or fp64 CPU tensor to add to, not {out.dtype} "
                f"on {out.device} with strides {list(out.stride())}"
            )
        _, codec, payload = _open(blob, tuple(out.shape))
        flat = out.detach().view(-1)
        for where, values in codec._runs(payload, flat.numel()):
            # A copy: torch takes no read-only array, and a view would be one.
            piece = torch.from_numpy(np.array(values)).to(out.dtype)
            if isinstance(where, slice):
                flat[where].add_(piece, alpha=weight)
            else:
                flat.index_add_(0, torch.from_numpy(where), piece, alpha=weight)

    def _runs(
        self, payload: memoryview, count: int
    ) -> Iterator[tuple[slice | NDArray[np.int64], NDArray[np.float32]]]:
        """Yield (where, finite values) over the flat tensor; zeros are left out."""
        split, indices = 0, None
        if self.sparse is not None:
            split = self.sparse.index_size(count)
            indices = self.sparse.unpack(payload[:split], count)
            count = indices.size
        for start, values in self.values.pieces(payload[split:], count):
            if not np.isfinite(values).all():
                raise CorruptPayload("a blob decodes to NaN or infinity")
            where = slice(start, start + values.size)
            yield where if indices is None else indices[where], values


def _assemble(spec: str, shape: tuple[int, ...], dtype: torch.dtype, payload: bytes) -> bytes:
    name = spec.encode("ascii")
    head = struct.pack("<BBB", _CODES[dtype], len(shape), len(name)) + name
    head += struct.pack(f"<{len(shape)}Q", *shape)
    checksum = zlib.crc32(payload, zlib.crc32(head))
    return b"".join((MAGIC, struct.pack("<I", checksum), head, payload))


def _open(
    blob: bytes | memoryview, shape: tuple[int, ...] | None = None
) -> tuple[BlobInfo, Codec, memoryview]:
    """Header, codec and payload of a blob whose sizes all fit."""
    from flower_geo.compression.spec import chain

    view = memoryview(blob).cast("B")
    if len(view) < _FIXED.size or bytes(view[:4]) != MAGIC:
        raise CorruptPayload("these bytes are no tensor blob of this version")
    _, checksum, dtype, dimensions, length = _FIXED.unpack_from(view)
    start = _FIXED.size + length
    end = start + 8 * dimensions
    if dtype not in _DTYPES or dimensions > MAX_DIMENSIONS or len(view) < end:
        raise CorruptPayload("a blob's header is damaged")
    if zlib.crc32(view[8:]) != checksum:
        raise CorruptPayload("a blob's checksum does not match; it was cut or changed")
    found = struct.unpack_from(f"<{dimensions}Q", view, start)
    if shape is not None and found != tuple(shape):
        raise CorruptPayload(f"a blob holds shape {list(found)[:8]}, not {list(shape)}")
    # Without the zeros too: torch computes strides from all the dimensions.
    if math.prod(max(size, 1) for size in found) > MAX_VALUES:
        raise CorruptPayload(f"a blob claims shape {list(found)[:8]}, more than any tensor has")
    count = math.prod(found)
    try:
        text = bytes(view[_FIXED.size : start]).decode("ascii")
        codec = chain(text)
    except (UnicodeDecodeError, CodecSpecError):
        raise CorruptPayload("a blob's codec is not known") from None
    payload = view[end:]
    if len(payload) != codec.payload_size(count):
        raise CorruptPayload(
            f"a blob of {count} values under {codec.spec} has {len(payload)} bytes of payload"
        )
    return BlobInfo(codec.spec, found, _DTYPES[dtype], len(view)), codec, payload
