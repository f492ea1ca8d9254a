"""What ``compression_mod`` and ``CompressedStrategy`` write into each other's messages.

Each message gets one ``ConfigRecord`` more, ``geo-compression``, put last, so
that an app which takes the first of its records still finds its own.  The other
side takes it out again before anyone else sees the message.

An ``ArrayRecord`` that travels coded has keys with a prefix up to the first
``/``: ``=`` an Array as it was (integers, an app's own kinds of Array), ``+`` a
coded tensor, or a number, the version that a coded difference leads to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ConfigRecord, RecordDict
from flwr.common.constant import SType
from numpy.typing import NDArray
from torch import Tensor

from flower_geo.compression.codec import Codec
from flower_geo.compression.records import STYPE, read_array, record_nbytes
from flower_geo.errors import CorruptPayload

__all__ = [
    "KEY",
    "Held",
    "Returned",
    "Sent",
    "Update",
    "Work",
    "carried",
    "check_plain",
    "coded_array",
    "content_nbytes",
    "decoded",
    "plain_array",
    "role",
    "split_key",
    "without_envelope",
]

KEY = "geo-compression"
#: Raised by one whenever an older side could not understand a newer one.
PROTOCOL = 1
#: dtypes of Flower Arrays that are coded, and what differences of them are taken in.
WIDE: dict[str, Any] = {"float16": np.float32, "float32": np.float32, "float64": np.float64}
#: Records, and letters of a text, that an envelope may name.
MAX_RECORDS, MAX_TEXT = 256, 4096
_KINDS = ("whole", "packed", "deltas", "none")


@dataclass(frozen=True)
class Sent:
    """How one ArrayRecord of a request travels.

    Attributes:
        record: its key.
        kind: ``whole`` (plain Arrays, as any client reads them), ``packed``
            (whole, by a lossless codec), ``deltas`` (versions ``first`` to
            ``last``) or ``none`` (the client holds ``last``).
        stream: which succession of versions; "" for a record of none.
        hash: content hash of version ``last``.
    """

    record: str
    kind: str
    stream: str = ""
    first: int = 0
    last: int = 0
    hash: str = ""


@dataclass(frozen=True)
class Work:
    """From the wrapper to the mod.

    Attributes:
        uplink: codec for the reply, unless the mod has its own.
        exact: the downlink codec is lossless.
        accepted: the last update of this client that was handed on.
        sent: one for every ArrayRecord.
        uncoded: keys and names, divided by a line break, of tensors in whole records
            that no version codes although they look it, as they were integers before.
    """

    uplink: str
    exact: bool
    accepted: str
    sent: tuple[Sent, ...]
    uncoded: tuple[str, ...] = ()

    def to_record(self) -> ConfigRecord:
        """As Flower sends it."""
        own = {
            "uplink": self.uplink, "exact": self.exact, "accepted": self.accepted,
            "uncoded": list(self.uncoded),
        }  # fmt: skip
        return _record("request", {**own, **_rows(self.sent, Sent)})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Work:
        """Read and check it.

        Raises:
            CorruptPayload: it is damaged, or of another version.
        """
        _check_protocol(record)
        sent = tuple(Sent(*row) for row in _columns(record, Sent))
        if any(each.kind not in _KINDS for each in sent):
            raise CorruptPayload("a compressed request holds a kind of payload that is not known")
        return cls(
            _typed(record, "uplink", str), _typed(record, "exact", bool),
            _typed(record, "accepted", str), sent, tuple(map(str, _list(record, "uncoded"))),
        )  # fmt: skip


@dataclass(frozen=True)
class Returned:
    """What one ArrayRecord of a reply is.

    Attributes:
        record: its key.
        base: key of the request's record it is the difference to; "" = values.
        stream, version: of that record; "" and 0 for a record of no stream.
    """

    record: str
    base: str = ""
    stream: str = ""
    version: int = 0


@dataclass(frozen=True)
class Held:
    """A version that the client holds from now on."""

    held: str
    held_stream: str
    held_version: int


@dataclass(frozen=True)
class Update:
    """From the mod to the wrapper.

    Attributes:
        update: name of the residual that waits for an acknowledgement; "" = none.
        returned: one for every ArrayRecord.
        held: what the client can take differences to.
    """

    update: str
    returned: tuple[Returned, ...]
    held: tuple[Held, ...]

    def to_record(self) -> ConfigRecord:
        """As Flower sends it."""
        rows = {**_rows(self.returned, Returned), **_rows(self.held, Held)}
        return _record("reply", {"update": self.update, **rows})

    @classmethod
    def from_record(cls, record: ConfigRecord) -> Update:
        """Read and check it; it comes from a machine we do not own.

        Raises:
            CorruptPayload: it is damaged, or of another version.
        """
        _check_protocol(record)
        return cls(
            _typed(record, "update", str),
            tuple(Returned(*row) for row in _columns(record, Returned)),
            tuple(Held(*row) for row in _columns(record, Held)),
        )


def _record(role: str, values: dict[str, Any]) -> ConfigRecord:
    """Without empty values: Flower's ``count_bytes``, and so its own mods, fails on those."""
    filled = {name: value for name, value in values.items() if value not in ("", [])}
    return ConfigRecord({"role": role, "protocol": PROTOCOL, **filled})


def _rows(rows: tuple[Any, ...], kind: type) -> dict[str, Any]:
    """Rows as lists of one type each, which is what a ConfigRecord holds."""
    return {name: [getattr(row, name) for row in rows] for name in _fields(kind)}


def _fields(kind: type) -> dict[str, type]:
    return {name: int if text == "int" else str for name, text in kind.__annotations__.items()}


def _columns(record: ConfigRecord, kind: type) -> list[tuple[Any, ...]]:
    columns = []
    for name, wanted in _fields(kind).items():
        column = _list(record, name)
        if len(column) > MAX_RECORDS:
            raise CorruptPayload(f"a compressed message has too long a list under {name!r}")
        for value in column:
            _check(value, name, wanted)
        columns.append(column)
    if len({len(column) for column in columns}) != 1:
        raise CorruptPayload("a compressed message has lists of unequal length")
    rows = list(zip(*columns, strict=True))
    if len({row[0] for row in rows}) != len(rows):
        raise CorruptPayload("a compressed message names a record twice")
    return rows


def _list(record: ConfigRecord, name: str) -> list[Any]:
    column = record.get(name, [])
    if not isinstance(column, list):
        raise CorruptPayload(f"a compressed message has no list under {name!r}")
    return column


def _check(value: object, name: str, wanted: type) -> None:
    right = type(value) is wanted
    if right and isinstance(value, str):
        right = len(value) <= MAX_TEXT
    elif right and isinstance(value, int):
        right = 0 <= value < 2**53
    if not right:
        raise CorruptPayload(f"a compressed message has an odd value under {name!r}")


def _typed(record: ConfigRecord, name: str, wanted: type) -> Any:
    value = record.get(name, "" if wanted is str else None)
    _check(value, name, wanted)
    return value


def _check_protocol(record: ConfigRecord) -> None:
    if record.get("protocol") != PROTOCOL:
        raise CorruptPayload(
            f"the other side's compression speaks protocol {str(record.get('protocol'))[:20]!r}, "
            f"this one {PROTOCOL}; install the same flower-geo version at both"
        )


def role(content: RecordDict) -> str:
    """``request``, ``reply`` or "" by the envelope's own word."""
    record = content[KEY] if KEY in content else None
    found = record.get("role") if isinstance(record, ConfigRecord) else None
    return found if isinstance(found, str) and found in ("request", "reply") else ""


def without_envelope(content: RecordDict) -> dict[str, Any]:
    """The other records, in order, by key."""
    return {key: record for key, record in content.items() if key != KEY}


def carried(record: Mapping[str, Array], exact: bool) -> list[str]:
    """Names of the Arrays that a codec carries; the others travel as they are.

    A lossless codec is lossless for fp32 only, so it carries nothing else.
    """
    dtypes = {"float32"} if exact else WIDE.keys()
    return [
        name for name, array in record.items()
        if array.stype == SType.NUMPY and array.dtype in dtypes
    ]  # fmt: skip


def content_nbytes(content: RecordDict) -> int:
    """Bytes of a message's arrays and of its envelope."""
    envelope: Mapping[str, Any] = content.config_records.get(KEY, {})
    arrays = sum(record_nbytes(record) for record in content.array_records.values())
    return arrays + sum(len(key) + _value_nbytes(value) for key, value in envelope.items())


def _value_nbytes(value: Any) -> int:
    """Flower's own count fails on what is empty, and a client may send that."""
    if isinstance(value, list):
        return sum(map(_value_nbytes, value))
    return len(value) if isinstance(value, str | bytes) else 8


def split_key(key: str) -> tuple[str, str]:
    """Prefix and name of a key of a coded record."""
    prefix, found, name = key.partition("/")
    if not found:
        raise CorruptPayload(f"a compressed record has the odd key {key[:40]!r}")
    return prefix, name


def plain_array(values: NDArray[Any] | Tensor, dtype: str) -> Array:
    """A Flower Array of that dtype."""
    found = values.numpy() if isinstance(values, Tensor) else values
    with np.errstate(over="ignore"):
        return Array(np.asarray(found, dtype=np.dtype(dtype)))


def coded_array(blob: bytes, array: Array) -> Array:
    """An Array that holds a blob in place of ``array``."""
    return Array(array.dtype, tuple(array.shape), STYPE, blob)


def check_plain(name: str, array: Array) -> None:
    """Refuse an Array that Flower would choke on, or that is not finite.

    Kinds of Array that are not Flower's own are an app's affair.

    Raises:
        CorruptPayload: it is damaged, hostile, or holds NaN or infinity.
    """
    if array.stype != SType.NUMPY:
        return
    try:
        shape, _, dtype, payload = read_array(array.data)
    except Exception:
        raise CorruptPayload(f"tensor {name[:80]} is no array that can be read") from None
    if dtype.kind not in "?biufc" or min(shape, default=0) < 0 or shape != tuple(array.shape):
        raise CorruptPayload(f"tensor {name[:80]} is not the array it claims to be")
    if math.prod(shape) * dtype.itemsize != len(payload):
        raise CorruptPayload(f"tensor {name[:80]} has {len(payload)} bytes for {list(shape)[:8]}")
    if dtype.kind == "f" and not np.isfinite(np.frombuffer(payload, dtype)).all():
        raise CorruptPayload(f"tensor {name[:80]} holds NaN or infinity")


def decoded(array: Array, name: str) -> NDArray[Any]:
    """Decode a coded Array to fp32.

    The caller has seen to it that the shape the Array states is one to expect.

    Raises:
        CorruptPayload: it is damaged or hostile, or of another shape than it states.
    """
    if array.stype != STYPE or array.dtype not in WIDE:
        raise CorruptPayload(f"tensor {name[:80]} is not coded as it claims to be")
    try:
        tensor = Codec.decode(array.data, torch.float32, tuple(array.shape))
    except CorruptPayload as error:
        raise CorruptPayload(f"tensor {name[:80]}: {error}") from None
    return np.asarray(tensor.numpy())
