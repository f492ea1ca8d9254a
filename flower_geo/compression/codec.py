"""Codecs: immutable values that turn one tensor into one self-describing blob.

    magic "GEO" 0x01 | crc32 of the rest u32 | dtype u8 | dimensions u8 | spec length u8
    | spec, ASCII | dimensions, u64 each | payload

All integers little-endian.  The size of a payload follows from the spec and the
shape alone, and so do the bounds of a packed one (zstd), so a decoder compares
lengths before it allocates; nothing in a blob is ever trusted to say how large
something is.  Where values cost nothing, zeros fill a payload up to a byte for
every 4096 values, and so even a decoder that is told no shape has a bound.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flower_geo.compression.buffers import blank
from flower_geo.compression.checksum import crc32
from flower_geo.compression.floats import (
    FP32,
    AddsTo,
    Bytes,
    Floats,
    ValueCodec,
    Writes,
    Zero,
    finite,
)
from flower_geo.compression.lossless import Packer, Section, sections_of
from flower_geo.compression.randk import Drawn
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
#: Values a payload byte may stand for: those a selection leaves out and runs of
#: zeros under zstd would cost nothing to claim.
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
    """A chain: optionally select values, code them, optionally pack the bytes.

    Attributes:
        values: the value codec.
        sparse: the selection before it, if any.
        packer: the lossless stage after it, if any.
    """

    values: ValueCodec
    sparse: Selection | Drawn | None = None
    packer: Packer | None = None

    @property
    def spec(self) -> str:
        """The canonical spec string."""
        stages = (self.sparse, self.values, self.packer)
        return "|".join(stage.spec for stage in stages if stage is not None)

    @property
    def lossless(self) -> bool:
        """Whether decoding gives every finite fp32 back to the bit."""
        return self.sparse is None and self.values.lossless

    def for_tensor(self, name: str) -> Codec:
        """The codec for a tensor of this name: itself."""
        return self

    def payload_size(self, count: int) -> int:
        """Exact payload bytes for ``count`` values; before packing, if there is a packer."""
        return max(self._plain_size(count), _floor(count))

    def _plain_size(self, count: int) -> int:
        """Payload bytes before packing and filling up."""
        if self.sparse is None:
            return self.values.size(count)
        return self.sparse.index_size(count) + self.values.size(self.sparse.kept(count))

    def _sections(self, count: int) -> list[Section]:
        if self.sparse is None:
            return sections_of(self.values, count)
        head = (self.sparse.index_size(count), 1)
        return [head, *sections_of(self.values, self.sparse.kept(count))]

    def encode(self, tensor: Tensor, name: str = "") -> bytes:
        """Encode a floating-point tensor of any shape, strides or device.

        A tensor that this codec would make larger than raw fp32 is stored as
        raw fp32 instead, one that packing makes no smaller is not packed, and of
        one that holds only zeros no values are stored; the blob's own spec says so.

        Args:
            tensor: fp32, bf16, fp16 or fp64 (which is rounded to fp32).
            name: named in errors.

        Raises:
            NonFiniteTensor: it holds NaN or infinity, or would after scaling.
            CodecError: it is not of floating point, or not dense.
        """
        what = f"tensor {name or 'to encode'}"
        if tensor.dtype not in _CODES:
            raise CodecError(
                f"{what} is {tensor.dtype}, not floating point; "
                "only parameters, activations and their gradients are sent"
            )
        if tensor.layout != torch.strided or tensor.is_meta:
            kind = "on the meta device" if tensor.is_meta else str(tensor.layout)
            raise CodecError(f"{what} is {kind}; only dense tensors with values can be sent")
        source, shape = tensor.dtype, tuple(tensor.shape)
        if len(shape) > MAX_DIMENSIONS:
            raise CodecError(
                f"{what} has {len(shape)} dimensions; reshape it to at most {MAX_DIMENSIONS}"
            )
        dense = tensor.detach().to("cpu", torch.float32).resolve_neg().contiguous()
        flat: Floats = dense.view(-1).numpy()
        count = flat.size
        chosen, raw = replace(self, packer=None), Codec(FP32())
        if chosen.payload_size(count) + len(chosen.spec) >= 4 * count + len(raw.spec):
            chosen = raw
        if _only_zeros(flat):
            return _Draft(Zero.spec, shape, source, _floor(count)).sealed()
        try:
            if self.packer is None:
                blob = _Draft(chosen.spec, shape, source, chosen.payload_size(count))
                chosen._write(flat, blob.payload[: chosen._plain_size(count)])
            else:
                blob = chosen._packed(self.packer, flat, shape, source)
        except NonFiniteTensor as error:
            raise NonFiniteTensor(f"{what} {error}; it is not sent") from None
        return blob.sealed()

    def _write(self, flat: Floats, out: Bytes) -> None:
        """Fill ``out``, of :meth:`_plain_size`; ``NonFiniteTensor`` names no tensor."""
        if self.sparse is not None:
            if not finite(flat):
                raise NonFiniteTensor("holds NaN or infinity")
            if isinstance(self.sparse, Drawn):
                head, _, flat = self.sparse.draw(flat)
                if not finite(flat):
                    raise NonFiniteTensor(f"exceeds fp32 when {self.sparse.spec} scales it")
            else:
                indices = self.sparse.select(flat)
                head, flat = self.sparse.pack(indices, flat.size), flat[indices]
            out[: len(head)] = np.frombuffer(head, dtype=np.uint8)
            out = out[len(head) :]
        if isinstance(self.values, Writes):
            if not self.values.write(flat, out):
                raise NonFiniteTensor("holds NaN or infinity")
            return
        if self.sparse is None and not finite(flat):
            raise NonFiniteTensor("holds NaN or infinity")
        payload = self.values.encode(flat)
        if len(payload) != out.size:
            raise CodecError(
                f"{self.values.spec} made {len(payload)} bytes of {flat.size} values and its "
                f"size() says {out.size}"
            )
        out[:] = np.frombuffer(payload, dtype=np.uint8)

    def _packed(
        self, packer: Packer, flat: Floats, shape: tuple[int, ...], dtype: torch.dtype
    ) -> _Draft:
        """With ``packer`` at the end where that makes a shorter blob, else without."""
        if self.sparse is None and isinstance(self.values, FP32):  # spares a copy
            plain = flat.astype("<f4", copy=False).view(np.uint8)
            if not finite(flat):
                raise NonFiniteTensor("holds NaN or infinity")
        else:
            plain = np.empty(self._plain_size(flat.size), dtype=np.uint8)
            self._write(flat, plain)
        chosen, size = replace(self, packer=packer), self.payload_size(flat.size)
        parts = packer.pack(plain.data, self._sections(flat.size))
        packed = max(sum(map(len, parts)), _floor(flat.size))
        if packed + len(chosen.spec) < size + len(self.spec) and packed < plain.size:
            blob = _Draft(chosen.spec, shape, dtype, packed)
            blob.fill(parts)
        else:
            blob = _Draft(self.spec, shape, dtype, size)
            blob.fill([plain.data])
        return blob

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
                it, a blob of n bytes can claim no more than 4096 n values.

        Raises:
            CorruptPayload: the blob is damaged or hostile, or of another shape.
        """
        info, codec, payload = _open(blob, shape)
        count = math.prod(info.shape)
        plain = codec._plain(payload, count)
        out = (np.empty if codec.sparse is None else np.zeros)(count, dtype=np.float32)
        for where, values in codec._runs(plain, count):
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
        plain = codec._plain(payload, flat.numel())
        if codec.sparse is None and isinstance(codec.values, AddsTo):
            codec.values.add_to(plain, flat.numel(), flat, weight)
            return
        for where, values in codec._runs(plain, flat.numel()):
            # A copy where it is needed: torch takes no read-only array.
            piece = torch.from_numpy(np.require(values, requirements=["C", "W"])).to(out.dtype)
            if isinstance(where, slice):
                flat[where].add_(piece, alpha=weight)
            else:
                flat.index_add_(0, torch.from_numpy(where), piece, alpha=weight)

    def _plain(self, payload: memoryview, count: int) -> memoryview:
        """The payload without packing and filling."""
        plain, used = payload, self._plain_size(count)
        if self.packer is not None:
            plain, used = self.packer.unpack(payload, self._sections(count))
        if len(payload) != max(used, _floor(count)) or bytes(payload[used:]).strip(b"\0"):
            raise CorruptPayload(f"a blob under {self.spec} has bytes after its payload")
        return plain[: self._plain_size(count)]

    def _runs(
        self, plain: memoryview, count: int
    ) -> Iterator[tuple[slice | NDArray[np.int64], Floats]]:
        """Yield (where, finite values) over the flat tensor; zeros are left out."""
        split, indices = 0, None
        if self.sparse is not None:
            split = self.sparse.index_size(count)
            indices = self.sparse.unpack(plain[:split], count)
            count = indices.size
        for start, values in self.values.pieces(plain[split:], count):
            if not finite(values):
                raise CorruptPayload("a blob decodes to NaN or infinity")
            where = slice(start, start + values.size)
            yield where if indices is None else indices[where], values


class _Draft:
    """A blob whose payload is still to be written, in place."""

    def __init__(self, spec: str, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> None:
        name = spec.encode("ascii")
        head = _FIXED.pack(MAGIC, 0, _CODES[dtype], len(shape), len(name)) + name
        head += struct.pack(f"<{len(shape)}Q", *shape)
        self._owner, self._all = blank(len(head) + size)
        self._all[: len(head)] = np.frombuffer(head, dtype=np.uint8)
        #: All zeros.
        self.payload: Bytes = self._all[len(head) :]

    def fill(self, parts: Sequence[bytes | memoryview]) -> None:
        """Write parts one after another."""
        start = 0
        for part in parts:
            self.payload[start : start + len(part)] = np.frombuffer(part, dtype=np.uint8)
            start += len(part)

    def sealed(self) -> bytes:
        """The blob, under its checksum."""
        checksum = struct.pack("<I", crc32(self._all[8:].data))
        self._all[4:8] = np.frombuffer(checksum, dtype=np.uint8)
        del self._all, self.payload  # with a view left, the bytes would be a copy
        return self._owner.getvalue()


def _only_zeros(values: Floats) -> bool:
    """Whether there are values and all are +0, to the bit; seldom looks at more than one."""
    return bool(values.size and values[0] == 0 and not values.view(np.uint32).any())


def _floor(count: int) -> int:
    """Bytes that a payload of ``count`` values has at least."""
    return -(-count // MAX_VALUES_PER_BYTE)


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
    if crc32(view[8:]) != checksum:
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
    payload, size = view[end:], codec.payload_size(count)
    least = size
    if codec.packer is not None:
        least = max(codec.packer.fewest(codec._sections(count)), _floor(count))
        size -= 1  # or it would not have been packed
    if not least <= len(payload) <= size:
        raise CorruptPayload(
            f"a blob of {count} values under {codec.spec} has {len(payload)} bytes of payload"
        )
    return BlobInfo(codec.spec, found, _DTYPES[dtype], len(view)), codec, payload
