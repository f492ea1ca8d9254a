"""What the site half of a split model asks of the cloud half, and what it gets.

The two halves of training and the stream between them meet in these two classes
and nowhere else: whoever trains knows nothing of the stream, and the stream
nothing of training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from flower_geo.errors import FrameRefused

__all__ = [
    "KINDS",
    "MAX_BLOBS",
    "MAX_META",
    "MAX_NAME",
    "Answer",
    "Blob",
    "Call",
    "pack_meta",
    "read_meta",
]

#: What a call may be for.
KINDS = ("forward", "backward", "step", "evaluate", "finish")
#: Bytes of a meta object as JSON, and tensors of one call.
MAX_META, MAX_BLOBS = 64 * 1024, 256
#: Steps and micro-batches are not above these.
MAX_STEP, MAX_MICRO = 2**53, 2**31
#: Letters of a blob's name.
MAX_NAME = 256

#: A tensor as ``flower_geo.compression.Codec.encode`` writes it.  A large one that
#: came over the stream is a view of a mapped file, and is read as any other.
Blob: TypeAlias = bytes | memoryview


@dataclass(frozen=True)
class Call:
    """One request of the site's half.

    Attributes:
        kind: one of ``KINDS``.
        step: local step of the round, from 1; 0 outside training.
        micro: micro-batch within the step, from 0.
        meta: a small JSON object, at most 64 KiB as JSON.
        blobs: coded tensors by name; not to be changed from now on, as they may be
            read again whenever a connection breaks.

    Raises:
        FrameRefused: a field is of no use to the other side.
    """

    kind: str
    step: int
    micro: int = 0
    meta: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FrameRefused(f"a call's kind is {self.kind[:40]!r}, not one of {KINDS}")
        if not (0 <= self.step <= MAX_STEP and 0 <= self.micro <= MAX_MICRO):
            raise FrameRefused(f"no call can be of step {self.step}, micro-batch {self.micro}")
        pack_meta(self.meta)
        _check_names(self.blobs)


@dataclass(frozen=True)
class Answer:
    """What one call came to; ``meta`` and ``blobs`` as in :class:`Call`."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    blobs: Mapping[str, Blob] = field(default_factory=dict)

    def __post_init__(self) -> None:
        pack_meta(self.meta)
        _check_names(self.blobs)


def pack_meta(meta: Mapping[str, Any]) -> bytes:
    """A meta object as JSON; floats keep every bit.

    Raises:
        FrameRefused: it is no JSON object (NaN and infinity are none), or too long.
    """
    try:
        text = json.dumps(dict(meta), allow_nan=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise FrameRefused(f"a call's meta is no JSON object: {str(error)[:200]}") from None
    if len(text) > MAX_META:
        raise FrameRefused(
            f"a call's meta has {len(text)} bytes as JSON, more than {MAX_META}; send it as a blob"
        )
    return text


def read_meta(text: bytes) -> dict[str, Any]:
    """The meta object that :func:`pack_meta` wrote; ``text`` may come from anywhere.

    Raises:
        FrameRefused: it is none.
    """
    if len(text) > MAX_META:
        raise FrameRefused(f"a call's meta has {len(text)} bytes, more than {MAX_META}")
    try:
        meta = json.loads(text, parse_constant=_no_constant) if text else {}
    except (ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise FrameRefused("a call's meta is no JSON object")
    return meta


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _check_names(blobs: Mapping[str, Blob]) -> None:
    if len(blobs) > MAX_BLOBS:
        raise FrameRefused(f"a call has {len(blobs)} blobs, more than {MAX_BLOBS}")
    for name in blobs:
        if not 0 < len(name) <= MAX_NAME or not name.isprintable():
            raise FrameRefused(f"{name[:40]!r} is no name for a blob")
