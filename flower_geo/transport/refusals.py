"""Errors as they travel: by the name of their class."""

from __future__ import annotations

from typing import cast

from flower_geo.errors import (
    CallFailed,
    DeadlineExceeded,
    FrameRefused,
    HandshakeRefused,
    SessionLost,
    SplitError,
    TokenRefused,
)
from flower_geo.errors import Fault as _Fault
from flower_geo.messages import one_line
from flower_geo.transport import split_pb2 as pb

__all__ = ["read_refusal", "refusal"]

#: Letters of a message, names of terms, and letters of one.
MAX_MESSAGE, MAX_TERMS, MAX_TERM = 2000, 128, 64
_FAULTS = ("site", "cloud", "network")
_KINDS = {
    kind.__name__: kind
    for kind in (
        HandshakeRefused, TokenRefused, FrameRefused, SessionLost, DeadlineExceeded, CallFailed,
    )
}  # fmt: skip


def refusal(error: SplitError) -> pb.Refusal:
    """An error for the wire; of a class that is not known there it becomes ``CallFailed``."""
    name = type(error).__name__
    return pb.Refusal(
        error=name if name in _KINDS else CallFailed.__name__,
        message=one_line(str(error), MAX_MESSAGE),
        retry=error.retry,
        fault=error.fault,
        terms=error.terms if isinstance(error, HandshakeRefused) else (),
    )


def read_refusal(found: pb.Refusal) -> SplitError:
    """The error that the other end sent."""
    kind = _KINDS.get(found.error, CallFailed)
    message = one_line(found.message, MAX_MESSAGE) or "refused without a word"
    fault = cast("_Fault | None", found.fault if found.fault in _FAULTS else None)
    if kind is HandshakeRefused:
        terms = tuple(one_line(name, MAX_TERM) for name in found.terms[:MAX_TERMS])
        return HandshakeRefused(message, terms=terms, retry=found.retry, fault=fault)
    return kind(message, retry=found.retry, fault=fault)
