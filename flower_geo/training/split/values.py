"""Tensors in calls: exact ones, whole numbers, and what of a call is believed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flower_geo.calls import Blob
from flower_geo.compression import Codec, codec
from flower_geo.errors import CallFailed

__all__ = [
    "DTYPES", "NAMES", "blob_of", "exact_blob", "finite_number", "integers", "integers_blob",
    "number_json", "refused", "whole_number",
]  # fmt: skip

#: Dtypes of hidden states, by the names they have in a call's meta.
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_EXACT = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
_INTEGERS = codec("fp32|zstd")
#: Whole numbers below this are exact in fp32; no vocabulary reaches it.
_LIMIT = 2**24


def refused(what: str) -> CallFailed:
    """A call that is not what the cloud's half expects."""
    return CallFailed(f"a call was refused: {what}", fault="site")


def exact_blob(tensor: Tensor, name: str) -> Blob:
    """A floating-point tensor without loss.

    Raises:
        NonFiniteTensor: it holds NaN or infinity.
    """
    return codec(_EXACT.get(tensor.dtype, "fp32")).encode(tensor, name)


def integers_blob(tensor: Tensor, name: str) -> Blob:
    """Whole numbers of less than 2**24: ids, labels, positions, masks."""
    if tensor.numel() and int(tensor.abs().max()) >= _LIMIT:
        raise refused(f"{name} holds a number of {_LIMIT} or more, which is not sent")
    return _INTEGERS.encode(tensor.to("cpu", torch.float32), name)


def blob_of(blobs: Mapping[str, Blob], name: str) -> Blob:
    """The named blob, or ``CallFailed``."""
    found = blobs.get(name)
    if found is None:
        raise refused(f"it has no {name}; both sides must run the same mode")
    return found


def integers(
    blobs: Mapping[str, Blob],
    name: str,
    shapes: Sequence[tuple[int, ...]],
    low: int,
    high: int,
    *also: int,
) -> Tensor:
    """Whole numbers [of one of ``shapes``] from ``low`` to ``high``, or one of ``also``.

    Raises:
        CallFailed: they are missing, of another shape or out of range.
        CorruptPayload: the blob is damaged.
    """
    blob = blob_of(blobs, name)
    shape = Codec.inspect(blob).shape
    if shape not in shapes:
        raise refused(f"{name} has shape {list(shape)[:4]}, not {list(shapes[0])}")
    found = Codec.decode(blob, shape=shape)
    values = found.long()
    good = (values >= low) & (values <= high)
    for other in also:
        good |= values == other
    if not bool((good & (values == found)).all()):
        raise refused(f"{name} holds what is no whole number from {low} to {high}")
    return values


def whole_number(meta: Mapping[str, Any], key: str, high: int) -> int:
    """A whole number from 0 to ``high``, or ``CallFailed``."""
    value = meta.get(key)
    if type(value) is not int or not 0 <= value <= high:
        raise refused(f"its {key} is no whole number from 0 to {high}")
    return value


def finite_number(value: object, what: str) -> float:
    """A finite number, or ``CallFailed``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise refused(f"its {what} is no finite number")
    return float(value)


def number_json(value: float) -> float | str:
    """A number as JSON has it: NaN and infinity as words that ``float`` reads."""
    return value if math.isfinite(value) else repr(value)
