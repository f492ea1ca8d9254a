"""Every exception flower_geo raises on purpose.

    FlowerGeoError
    ├── ConfigError            a run-config or node-config key or value is wrong
    ├── DataError              a corpus is missing, empty, too short or unreadable
    ├── TrainingError          the inner loop cannot go on (loss not finite, ...)
    ├── WorkerFailed           a site's worker process dies again and again, or hangs
    ├── ModelError             a model cannot be built, loaded, matched or exported
    ├── CodecError
    │   ├── CodecSpecError     a codec spec string cannot be read
    │   ├── CorruptPayload     bytes from outside do not decode
    │   └── NonFiniteTensor    a tensor to be sent holds NaN or infinity
    ├── StateError
    │   ├── StateLocked        another live process holds the state folder
    │   ├── CheckpointCorrupt  a checkpoint fails its own hashes
    │   └── ResumeMismatch     a run folder belongs to another configuration
    ├── RoundError
    │   ├── NotEnoughSites     too few sites connected or answered
    │   ├── SuperLinkLost      the SuperLink was away longer than a round may take
    │   ├── ReplyRefused       one site's reply failed screening
    │   └── FactorError        LoRA factors that cannot be aggregated
    ├── SplitError             the stream between the halves of a split model
    │   ├── HandshakeRefused   the two ends do not agree on what they are to do
    │   ├── TokenRefused       a site's token is wrong, of another round, or too old
    │   ├── FrameRefused       what was sent breaks the protocol or its bounds
    │   ├── SessionLost        the cloud no longer knows the session: join anew
    │   ├── DeadlineExceeded   no connection, or no answer, in the time allowed
    │   └── CallFailed         the cloud could not carry a call out
    └── RunFailed              a submitted run ended without completing

A message is one line: what was wrong, where, and how to mend it.  Command-line
entry points print exactly that line and exit non-zero; they show a traceback
only for exceptions outside this tree.
"""

from __future__ import annotations

from typing import ClassVar, Literal, TypeAlias

__all__ = [
    "CallFailed",
    "CheckpointCorrupt",
    "CodecError",
    "CodecSpecError",
    "ConfigError",
    "CorruptPayload",
    "DataError",
    "DeadlineExceeded",
    "FactorError",
    "Fault",
    "FlowerGeoError",
    "FrameRefused",
    "HandshakeRefused",
    "ModelError",
    "NonFiniteTensor",
    "NotEnoughSites",
    "ReplyRefused",
    "ResumeMismatch",
    "RoundError",
    "RunFailed",
    "SessionLost",
    "SplitError",
    "StateError",
    "StateLocked",
    "SuperLinkLost",
    "TokenRefused",
    "TrainingError",
    "WorkerFailed",
]


class FlowerGeoError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(FlowerGeoError):
    """A configuration key or value is wrong."""


class DataError(FlowerGeoError):
    """Training data is missing, empty, too short or unreadable."""


class ModelError(FlowerGeoError):
    """A model or tokenizer cannot be built, loaded, matched or exported."""


class TrainingError(FlowerGeoError):
    """The inner loop cannot go on, for instance because the loss is not finite."""


class WorkerFailed(FlowerGeoError):
    """A site's worker process cannot be started, dies again and again, or hangs."""


class CodecError(FlowerGeoError):
    """Something in the compression layer went wrong."""


class CodecSpecError(CodecError, ValueError):
    """A codec spec string cannot be read."""


class CorruptPayload(CodecError, ValueError):
    """Bytes that came from outside do not decode to what they claim."""


class NonFiniteTensor(CodecError, ValueError):
    """A tensor to be encoded holds NaN or infinity."""


class StateError(FlowerGeoError):
    """Durable state cannot be read, written or used."""


class StateLocked(StateError):
    """Another live process holds the folder."""


class CheckpointCorrupt(StateError):
    """A checkpoint fails its own hashes."""


class ResumeMismatch(StateError):
    """A run folder belongs to a run with another configuration."""


class RoundError(FlowerGeoError):
    """A round cannot be completed."""


class NotEnoughSites(RoundError):
    """Too few sites connected or answered."""


class SuperLinkLost(RoundError):
    """The SuperLink could not be reached for longer than a round may take."""


class ReplyRefused(RoundError):
    """One site's reply failed screening; the round goes on without it."""


class FactorError(RoundError, ValueError):
    """LoRA factors cannot be aggregated: shape, rank, NaN, or a side that had to be equal.

    Attributes:
        site: position of the site at fault among those given; None where it is no one site's.
    """

    def __init__(self, message: str, site: int | None = None) -> None:
        super().__init__(message)
        self.site = site


Fault: TypeAlias = Literal["site", "cloud", "network"]


class SplitError(FlowerGeoError):
    """Something went wrong on the stream between the halves of a split model.

    Attributes:
        retry: the same again may succeed.
        fault: where the cause lies: ``site``, ``cloud`` or ``network``.
    """

    retry_by_default: ClassVar[bool] = False
    fault_by_default: ClassVar[Fault] = "cloud"

    def __init__(
        self, message: str, *, retry: bool | None = None, fault: Fault | None = None
    ) -> None:
        super().__init__(message)
        self.retry = self.retry_by_default if retry is None else retry
        self.fault: Fault = fault or self.fault_by_default


class HandshakeRefused(SplitError):
    """A site may not join: what it would train is not what the cloud trains.

    Attributes:
        terms: names of the terms that differ, sorted.
    """

    fault_by_default = "site"

    def __init__(
        self,
        message: str,
        *,
        terms: tuple[str, ...] = (),
        retry: bool | None = None,
        fault: Fault | None = None,
    ) -> None:
        super().__init__(message, retry=retry, fault=fault)
        self.terms = terms


class TokenRefused(SplitError):
    """A site's token is wrong, of another run, site or round, or too old."""

    fault_by_default = "site"


class FrameRefused(SplitError):
    """A call, an answer or a frame breaks the protocol, or is larger than agreed."""

    fault_by_default = "site"


class SessionLost(SplitError):
    """The cloud no longer has the session: join anew and go on from where it says."""

    retry_by_default = True


class DeadlineExceeded(SplitError):
    """No connection, or no answer, within the time allowed."""

    retry_by_default = True
    fault_by_default = "network"


class CallFailed(SplitError):
    """The cloud took a call and could not carry it out."""


class RunFailed(FlowerGeoError):
    """A submitted run ended without completing."""
