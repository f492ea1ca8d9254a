"""Bounds and times of the stream, and what was counted on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flower_geo.errors import ConfigError

__all__ = ["MAX_CHUNK", "MAX_FRAME", "Limits", "LinkStats", "Stats"]

#: Bytes of a blob in one frame, at most.
MAX_CHUNK = 2**20
#: Bytes of a frame, at most: a chunk, or a head with its meta and its list of blobs.
MAX_FRAME = MAX_CHUNK + 2**18


@dataclass(frozen=True)
class Limits:
    """Bounds and times; each side has its own, and the server's credits hold for both.

    Attributes:
        in_flight: calls of a session that are not yet acknowledged.
        bytes: bytes of their blobs.
        chunk: bytes of a blob in one frame.
        spool: a blob above so many bytes arrives in a file instead of in memory.
        memory: bytes of arriving blobs in memory, of all sessions together; beyond,
            smaller blobs go to files too.
        folder: where those files are; None for the system's temporary folder.
        sessions: sites at once.
        total: bytes the credits of all sessions may add up to.
        waiting: streams without a session that one machine may have open.
        greeting: seconds a new stream has for its hello.
        beat: seconds after which an idle end says that it lives.
        silence: seconds without a frame after which the other end counts as gone.
        linger: seconds a session without a stream is kept.
        call: seconds a call may take, from ``submit`` to its answer.
    """

    in_flight: int = 8
    bytes: int = 2**30
    chunk: int = 2**19
    spool: int = 2**25
    memory: int = 2**30
    folder: str | None = None
    sessions: int = 64
    total: int = 2**36
    waiting: int = 64
    greeting: float = 10.0
    beat: float = 10.0
    silence: float = 45.0
    linger: float = 180.0
    call: float = 900.0

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= MAX_CHUNK:
            raise ConfigError(f"chunk={self.chunk} is not between 1 and {MAX_CHUNK} bytes")
        if min(self.in_flight, self.bytes, self.sessions, self.waiting) < 1:
            raise ConfigError("in_flight, bytes, sessions and waiting are at least 1")
        if self.silence < 2 * self.beat:
            raise ConfigError(f"silence={self.silence} s leaves no room for beats of {self.beat} s")


@dataclass(frozen=True)
class LinkStats:
    """What one session has counted.

    Attributes:
        sent, received: bytes on the wire, what gRPC and HTTP/2 add included; within 2 %
            of the socket's where calls have 20 kB and more.
        calls, answers: that went through, each counted once.
        connections: streams opened for it, the first one included.
    """

    sent: int = 0
    received: int = 0
    calls: int = 0
    answers: int = 0
    connections: int = 0


@dataclass(frozen=True)
class Stats:
    """What a server has counted.

    Attributes:
        sites: of each site, all its sessions together.
        sessions, streams: open now.
        refused: how often each class of error went out, by its name.
        memory: bytes of arriving blobs in memory now.
    """

    sites: Mapping[str, LinkStats] = field(default_factory=dict)
    sessions: int = 0
    streams: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    memory: int = 0
