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
    └── RunFailed              a submitted run ended without completing

A message is one line: what was wrong, where, and how to mend it.  Command-line
entry points print exactly that line and exit non-zero; they show a traceback
only for exceptions outside this tree.
"""

from __future__ import annotations

__all__ = [
    "CheckpointCorrupt",
    "CodecError",
    "CodecSpecError",
    "ConfigError",
    "CorruptPayload",
    "DataError",
    "FactorError",
    "FlowerGeoError",
    "ModelError",
    "NonFiniteTensor",
    "NotEnoughSites",
    "ReplyRefused",
    "ResumeMismatch",
    "RoundError",
    "RunFailed",
    "StateError",
    "StateLocked",
    "SuperLinkLost",
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


class RunFailed(FlowerGeoError):
    """A submitted run ended without completing."""
