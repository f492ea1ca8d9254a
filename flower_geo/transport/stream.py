"""One stream at the cloud's end: reads what a site sends, from a hello to the end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any, Protocol

import grpc

from flower_geo.errors import CallFailed, FrameRefused, HandshakeRefused, SplitError
from flower_geo.transport import split_pb2 as pb
from flower_geo.transport.assembly import Assembler
from flower_geo.transport.frames import Stamp, parse
from flower_geo.transport.limits import Limits, LinkStats
from flower_geo.transport.outbox import Outbox
from flower_geo.transport.session import Handler, Session
from flower_geo.transport.spool import Store

__all__ = ["Stream"]

_STRANGER = Stamp(b"", 0, 0, 0)


class _Server(Protocol):
    handler: Handler
    store: Store

    def admit(self, stream: Any, frame: pb.Frame) -> Session: ...
    def leave(self, session: Session) -> None: ...
    def count_refusal(self, error: SplitError) -> None: ...


class Stream:
    """One stream of a site.

    Attributes:
        peer: the machine at the other end.
        site: its name, once its token has been seen.
        session: once it has one.
        outbox: what is to be sent.
    """

    def __init__(self, context: Any, limits: Limits) -> None:
        self._context, self._limits = context, limits
        self.peer = context.peer().rpartition(":")[0]
        self.site = ""
        self.session: Session | None = None
        self.outbox = Outbox(limits.beat, self._beat)
        self._heard = time.monotonic()
        self._greeted = self._joining = False
        self._thread: threading.Thread | None = None

    def read(self, requests: Iterator[bytes], server: _Server) -> None:
        """Begin to read, in a thread of its own."""
        name = f"split-read-{self.peer}"
        self._thread = threading.Thread(
            target=self._read, args=(requests, server), name=name, daemon=True
        )
        self._thread.start()

    def join(self, seconds: float) -> None:
        """Wait for that thread."""
        if self._thread is not None:
            self._thread.join(seconds)

    def cancel(self) -> None:
        """Break the stream."""
        self._context.cancel()  # first: an outbox that closes ends the stream well
        self.outbox.close()

    def count(self) -> LinkStats:
        """What it has counted."""
        return LinkStats(self.outbox.meter.sent, self.outbox.meter.received)

    def look(self, now: float) -> None:
        """Break the stream if the other end is too slow, or gone."""
        silent = now - self._heard
        if not self._greeted and silent > self._limits.greeting:
            error = HandshakeRefused(f"no hello came within {self._limits.greeting:g} s")
            self.outbox.close(_STRANGER.refusal(error))
        gone = not self._joining and silent > self._limits.silence
        if gone or self.outbox.stuck(now) > self._limits.silence:
            self.cancel()

    def _beat(self) -> bytes:
        if self.session is None:
            return _STRANGER.beat(0)
        return self.session.stamp.beat(self.session.received)

    def _read(self, requests: Iterator[bytes], server: _Server) -> None:
        stamp = _STRANGER
        try:
            frames = self._frames(requests)
            first = next(frames, None)
            if first is None:
                return
            self._greeted = self._joining = True
            try:
                session = server.admit(self, first)
            finally:
                self._joining, self._heard = False, time.monotonic()
            stamp = session.stamp
            self._converse(frames, first, session, server)
        except SplitError as error:
            server.count_refusal(error)
            self.outbox.close(stamp.refusal(error))
        except Exception as error:  # the other streams go on
            what = f"{type(error).__name__}: {error}"
            self.outbox.close(stamp.refusal(CallFailed(f"the stream failed at the cloud: {what}")))
            raise
        finally:
            self.outbox.close()

    def _converse(
        self, frames: Iterator[pb.Frame], first: pb.Frame, session: Session, server: _Server
    ) -> None:
        assembler = Assembler(server.store, self._limits.chunk, session.admit)
        self.session = session
        done, also = first.hello.done, set(first.hello.also)
        session.attach(self, done, also, lambda: self._welcome(session))
        try:
            for frame in frames:
                body = frame.WhichOneof("body")
                if body == "beat" and not (frame.epoch or frame.beat.done):  # before the welcome
                    continue
                session.stamp.check(frame)
                if body in ("head", "chunk"):
                    message = assembler.take(frame)
                    if message is not None:
                        session.take(self, message, server.handler)
                elif body == "beat":
                    session.acknowledge(frame.beat.done)
                elif body == "bye":
                    session.detach(self)
                    server.leave(session)
                    self.outbox.close(session.stamp.bye())
                    return
                else:
                    raise FrameRefused(f"a {body} frame comes from no site within a session")
        finally:
            assembler.drop()
            session.detach(self)

    def _welcome(self, session: Session) -> bytes:
        frame = session.stamp.frame()
        welcome, limits = frame.welcome, self._limits
        welcome.step, welcome.done = session.joined.step, session.received
        welcome.in_flight, welcome.bytes = limits.in_flight, limits.bytes
        welcome.chunk = limits.chunk
        return frame.SerializeToString()

    def _frames(self, requests: Iterator[bytes]) -> Iterator[pb.Frame]:
        with contextlib.suppress(grpc.RpcError):  # the connection broke
            for data in requests:
                self._heard = time.monotonic()
                self.outbox.meter.took(len(data))
                yield parse(data)
