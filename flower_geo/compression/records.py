"""Tensors in Flower messages: one blob a tensor, in Arrays of serialisation type ``geo/1``."""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from flwr.common.constant import SType
from torch import Tensor

from flower_geo.compression.codec import MAX_VALUES, Codec
from flower_geo.compression.feedback import ErrorFeedback
from flower_geo.compression.floats import FP32
from flower_geo.compression.parallel import in_order, thread_count
from flower_geo.compression.spec import AnyCodec
from flower_geo.errors import CorruptPayload

__all__ = [
    "STYPE",
    "content_hash",
    "pack",
    "read_array",
    "record_blobs",
    "record_from_blobs",
    "record_nbytes",
    "unpack",
    "unpack_blobs",
]

STYPE = "geo/1"
#: Readers of the header of a .npy file by version of the format.
_HEADERS: dict[tuple[int, int], Callable[[io.BytesIO], tuple[tuple[int, ...], bool, Any]]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
_RAW = Codec(FP32())
Shapes = Mapping[str, tuple[int, ...]]


def pack(
    state: Mapping[str, Tensor],
    codec: AnyCodec,
    feedback: ErrorFeedback | None = None,
    threads: int | None = None,
) -> ArrayRecord:
    """Encode tensors into an ``ArrayRecord`` with the same keys in the same order.

    Args:
        state: floating-point tensors.
        codec: a codec or rules by name.
        feedback: adds residuals and stages new ones.
        threads: tensors encoded at a time (see ``parallel.thread_count``); the
            blobs are the same for any number.

    Raises:
        NonFiniteTensor: a tensor holds NaN or infinity.
    """

    def encode(name: str) -> bytes:
        if feedback is None:
            return codec.encode(state[name], name)
        return feedback.encode(name, state[name], codec)

    count = thread_count(threads, sum(tensor.numel() for tensor in state.values()))
    record = ArrayRecord()
    for (name, tensor), blob in zip(state.items(), in_order(encode, state, count), strict=True):
        record[name] = _array(blob, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
    return record


def _array(blob: bytes, dtype: str, shape: tuple[int, ...]) -> Array:
    return Array(dtype, shape, STYPE, blob)


def unpack(
    record: ArrayRecord, shapes: Shapes | None = None, threads: int | None = None
) -> dict[str, Tensor]:
    """Decode a record to fp32 tensors; plain Flower Arrays are taken too.

    Args:
        record: from :func:`pack` or Flower's own.
        shapes: the names and shapes it must have, no more and no fewer.
        threads: tensors decoded at a time (see ``parallel.thread_count``).

    Raises:
        CorruptPayload: a blob is damaged or hostile, or the schema differs.
    """
    _check_names(record, shapes)

    def decode(item: tuple[str, Array]) -> Tensor:
        name, array = item
        shape = None if shapes is None else tuple(shapes[name])
        if array.stype != STYPE:
            return _plain(name, array, shape)
        try:
            return Codec.decode(array.data, shape=shape)
        except CorruptPayload as error:
            raise CorruptPayload(f"tensor {name}: {error}") from None

    count = thread_count(threads, record_nbytes(record))  # a byte or more each, as a rule
    return dict(zip(record, in_order(decode, record.items(), count), strict=True))


def unpack_blobs(record: ArrayRecord, shapes: Shapes) -> dict[str, bytes]:
    """The record's blobs after a check of names, shapes, sizes and checksums.

    Plain Flower Arrays are re-coded as raw fp32 blobs.

    Raises:
        CorruptPayload: as :func:`unpack`.
    """
    _check_names(record, shapes)
    blobs = {}
    for name, array in record.items():
        shape = tuple(shapes[name])
        if array.stype != STYPE:
            blobs[name] = _RAW.encode(_plain(name, array, shape), name)
            continue
        try:
            found = Codec.inspect(array.data).shape
        except CorruptPayload as error:
            raise CorruptPayload(f"tensor {name}: {error}") from None
        if found != shape:
            raise CorruptPayload(f"tensor {name} has shape {list(found)}, not {list(shape)}")
        blobs[name] = array.data
    return blobs


def _check_names(record: ArrayRecord, shapes: Shapes | None) -> None:
    if shapes is None:
        return
    missing = [name for name in shapes if name not in record]
    extra = [name for name in record if name not in shapes]
    if missing or extra:
        named = [f"lacks {name}" for name in missing[:3]] + [f"has {name}" for name in extra[:3]]
        raise CorruptPayload(
            f"the tensors are not the model's: {len(missing)} missing, {len(extra)} unknown "
            f"({', '.join(named)})"
        )


def read_array(data: bytes) -> tuple[tuple[int, ...], bool, Any, memoryview]:
    """Shape, Fortran order, dtype and payload of a .npy file, as its header claims.

    numpy evaluates the header and raises many kinds of exception.  Whether payload
    and claims agree is for the caller to see.
    """
    file = io.BytesIO(data)
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"version {version} of the array format is for structures")
    shape, fortran, dtype = _HEADERS[version](file)
    return shape, fortran, dtype, memoryview(data)[file.tell() :]


def _plain(name: str, array: Array, shape: tuple[int, ...] | None) -> Tensor:
    """A Flower Array as fp32, in memory of its own.

    ``numpy.load`` would allocate what a header claims before it reads, and take
    an archive for an array.
    """
    if array.stype != SType.NUMPY:
        raise CorruptPayload(f"tensor {name} is of the unknown serialisation {array.stype[:40]!r}")
    try:
        found, fortran, dtype, payload = read_array(array.data)
    except Exception as error:
        line = " ".join(str(error).split())[:120]
        raise CorruptPayload(f"tensor {name} cannot be read: {line}") from None
    if dtype.kind != "f" or (shape is not None and found != shape):
        raise CorruptPayload(
            f"tensor {name} is {dtype}{list(found)[:8]}"
            + ("" if shape is None else f", not float{list(shape)}")
        )
    sizes_fit = 0 <= min(found, default=0) and math.prod(max(n, 1) for n in found) <= MAX_VALUES
    if not sizes_fit or math.prod(found) * dtype.itemsize != len(payload):
        raise CorruptPayload(f"tensor {name} has {len(payload)} bytes for {dtype}{list(found)[:8]}")
    values = np.frombuffer(payload, dtype).reshape(found, order="F" if fortran else "C")
    with np.errstate(over="ignore", invalid="ignore"):
        values = values.astype(np.float32, order="C")
    if not np.isfinite(values).all():
        raise CorruptPayload(f"tensor {name} holds NaN, infinity or a value beyond fp32")
    return torch.from_numpy(values)


def record_blobs(record: ArrayRecord) -> dict[str, bytes]:
    """Encoded bytes by tensor name, unchecked."""
    return {name: array.data for name, array in record.items()}


def record_from_blobs(blobs: Mapping[str, bytes]) -> ArrayRecord:
    """A record of blobs that :func:`record_blobs` gave."""
    record = ArrayRecord()
    for name, blob in blobs.items():
        info = Codec.inspect(blob)
        record[name] = _array(blob, str(info.dtype).removeprefix("torch."), info.shape)
    return record


def record_nbytes(record: ArrayRecord) -> int:
    """Payload bytes of a record."""
    return sum(len(array.data) for array in record.values())


def content_hash(state: Mapping[str, Tensor]) -> str:
    """Hex sha256 over names, dtypes, shapes and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        digest.update(f"{name}\0{tensor.dtype}\0{list(tensor.shape)}\0".encode())
        flat = tensor.reshape(-1)
        if flat.numel() < 2:  # contiguous whatever its stride, which cannot be viewed as bytes
            flat = flat.clone(memory_format=torch.contiguous_format)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
