"""The server's side of the uplink: replies back in plain Arrays, checked."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

from flower_geo.compression.codec import Codec
from flower_geo.compression.envelope import WIDE, check_plain, decoded, plain_array, split_key
from flower_geo.errors import CorruptPayload

__all__ = ["decode_record", "odd_schemas", "schema", "size"]

#: A tensor's name, and its shape where it is of floating point.
Schema = tuple[tuple[str, frozenset[tuple[str, tuple[int, ...] | None]]], ...]


def decode_record(record: ArrayRecord, base: ArrayRecord | None, most: int) -> ArrayRecord:
    """Plain Arrays from a coded record.

    Args:
        record: from a client.
        base: what it is the difference to; None for values.
        most: values that a record of no base may claim.

    Raises:
        CorruptPayload: it is damaged or hostile, or does not fit its base.
    """
    plain = ArrayRecord()
    for key, array in record.items():
        prefix, name = split_key(key)
        if name in plain or prefix not in ("=", "+"):
            raise CorruptPayload(f"a compressed record has the odd key {key[:40]!r}")
        if prefix == "=":
            check_plain(name, array)
            plain[name] = array
            continue
        if base is None:
            most -= math.prod(Codec.inspect(array.data).shape)
            if most < 0:
                raise CorruptPayload("it claims far more values than it was sent")
        found = decoded(array, name) if base is None else _added(array, name, base)
        plain[name] = plain_array(found, array.dtype)
    return plain


def _added(array: Array, name: str, base: Mapping[str, Array]) -> NDArray[Any]:
    if name not in base or base[name].dtype != array.dtype or array.dtype not in WIDE:
        raise CorruptPayload(f"tensor {name[:80]} is the difference to none that was sent")
    if array.shape != base[name].shape:
        raise CorruptPayload(f"tensor {name[:80]} is not of the shape that was sent")
    wide, dtype = WIDE[array.dtype], np.dtype(array.dtype)
    difference = decoded(array, name)
    with np.errstate(over="ignore"):
        found = (base[name].numpy().astype(wide) + difference.astype(wide)).astype(dtype)
    if not np.isfinite(found).all():
        raise CorruptPayload(f"tensor {name[:80]} leaves the range of {dtype}")
    return np.asarray(found)


def size(record: ArrayRecord) -> int:
    """Values in a record."""
    return sum(math.prod(array.shape) for array in record.values())


def schema(content: RecordDict | Mapping[str, ArrayRecord]) -> Schema:
    """Names of all records' tensors, with shapes where they are of floating point.

    Integers are left open: trees that are sent as bytes differ in length by client.
    """
    return tuple(
        (
            key,
            frozenset(
                (name, tuple(array.shape) if array.dtype in WIDE else None)
                for name, array in record.items()
            ),
        )
        for key, record in sorted(content.items())
        if isinstance(record, ArrayRecord)
    )


def odd_schemas(contents: Collection[RecordDict], sent: Iterable[ArrayRecord]) -> list[bool]:
    """Which contents hold other tensors than most; where as many differ, than those sent."""
    found = [schema(content) for content in contents]
    known = {part for record in sent for _, part in schema({"": record})}
    counts = Counter(found)
    usual = max(counts, key=lambda s: (counts[s], any(p in known for _, p in s)), default=None)
    return [each != usual for each in found]
