"""One site's session at the cloud: it outlives its streams, and runs every call once.

Two locks.  ``_serving`` is held while a call is handed to the handler, so that calls
come in order even while one stream takes over from another; ``_lock`` guards the
books.  An answer takes ``_lock`` only: the handler may give it from within ``serve``
or while it holds a lock of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from flower_geo.calls import Answer, Call
from flower_geo.errors import CallFailed, FrameRefused, SessionLost, SplitError
from flower_geo.transport.assembly import Message
from flower_geo.transport.frames import Outgoing, Stamp
from flower_geo.transport.hello import Hello, Joined
from flower_geo.transport.limits import Limits, LinkStats
from flower_geo.transport.outbox import Outbox
from flower_geo.transport.spool import Store

__all__ = ["Handler", "Line", "Session", "lost"]


class Handler(Protocol):
    """Who serves the calls; of one site in order, of several at once."""

    def join(self, hello: Hello) -> Joined:
        """Say where a new session begins; in a thread of its own, may block.

        Called for a site that has a session already, it means that the site begins
        anew: nothing of the old session comes any more.

        Raises:
            SplitError: the site may not join now.
        """

    def serve(self, site: str, call: Call, answer: Callable[[Answer | SplitError], None]) -> None:
        """Take a call; must not block.  ``answer`` may be called later, from any thread."""

    def gone(self, site: str) -> None:
        """The site ended its session, was dropped, or has been away for too long."""


class Line(Protocol):
    """A stream that a session may send on."""

    outbox: Outbox

    def cancel(self) -> None:
        """Break it."""


@dataclass
class _Open:
    """A call that is not acknowledged yet."""

    place: tuple[int, int]
    nbytes: int
    digest: bytes
    charged: int
    answer: Outgoing | None = None


class Session:
    """What the cloud knows of one session.

    Attributes:
        stamp: what its frames carry.
        received: every call up to this one has been handed to the handler.
        acknowledged: every answer up to this one has arrived.
        away: when its last stream ended; None while it has one.
        told: set once the handler knows that the session is over.
    """

    def __init__(
        self, hello: Hello, key: bytes, joined: Joined, limits: Limits, store: Store
    ) -> None:
        self.hello, self.joined = hello, joined
        self.stamp = Stamp(key, joined.epoch, hello.round, hello.attempt)
        self.received = self.acknowledged = 0
        self.calls = self.answers = self.connections = 0
        self.away: float | None = time.monotonic()
        self.told = threading.Event()
        self._limits, self._store = limits, store
        self._lock, self._serving = threading.Lock(), threading.Lock()
        self._open: dict[int, _Open] = {}
        self._line: Line | None = None
        self._ended: SplitError | None = None

    @property
    def site(self) -> str:
        """The site's name."""
        return self.hello.site

    def attach(self, line: Line, done: int, also: set[int], welcome: Callable[[], bytes]) -> None:
        """Go on over another stream: the welcome first, then every answer not there yet.

        Raises:
            SplitError: the session has ended.
            FrameRefused: the site claims answers it cannot have.
        """
        with self._lock:
            if self._ended is not None:
                raise self._ended
            before, self._line = self._line, line
            self.away = None
            self.connections += 1
            if before is not None:
                before.cancel()
            self._acknowledge(done)
            line.outbox.single(welcome())
            for number, call in sorted(self._open.items()):
                if call.answer is not None and number not in also:
                    line.outbox.put(call.answer.frames(self.stamp, self._limits.chunk))

    def detach(self, line: Line) -> None:
        """A stream is over; if it was this session's, the session waits for another."""
        with self._lock:
            if self._line is line:
                self._line, self.away = None, time.monotonic()

    def admit(self, message: Message) -> None:
        """Hold a call against the credits, before any of its bytes are taken.

        Raises:
            FrameRefused: it is beyond them, or not the next one.
        """
        if message.failure is not None:
            raise FrameRefused(f"call {message.number} says that it failed; only an answer can")
        Call(message.kind, message.step, message.micro, message.meta)  # checks them
        with self._lock:
            if self._ended is not None:
                raise self._ended
            self._check_number(message.number)
            if message.number - self.acknowledged > self._limits.in_flight:
                raise FrameRefused(
                    f"call {message.number} is beyond the credit of "
                    f"{self._limits.in_flight} calls after {self.acknowledged}"
                )
            out = sum(c.nbytes for n, c in self._open.items() if n != message.number)
            if out + message.nbytes > self._limits.bytes:
                raise FrameRefused(
                    f"call {message.number} of {message.nbytes} bytes is beyond the credit: "
                    f"{out} of {self._limits.bytes} bytes are outstanding"
                )

    def take(self, line: Line, message: Message, handler: Handler) -> None:
        """Hand a whole call to the handler, once; one that came before is answered again.

        Raises:
            FrameRefused: another call came under this number before.
        """
        with self._serving:
            with self._lock:
                if self._ended is not None or self._line is not line:
                    self._store.release(message.charged)
                    return
                self._check_number(message.number)
                known = self._open.get(message.number)
                if known is not None:
                    self._store.release(message.charged)
                    self._again(line, message, known)
                    return
                self.received = message.number
                self.calls += 1
                self._open[message.number] = _Open(
                    (message.step, message.micro), message.nbytes, message.digest, message.charged
                )
            answer = partial(self.answer, message.number)
            try:
                blobs = message.blobs
                call = Call(message.kind, message.step, message.micro, message.meta, blobs)
                handler.serve(self.site, call, answer)
            except SplitError as error:
                answer(error)
            except Exception as error:  # the stream and the other sites go on
                answer(CallFailed(f"call {message.number} failed: {type(error).__name__}: {error}"))

    def answer(self, number: int, result: Answer | SplitError) -> None:
        """What the handler says to a call; a second word to the same call is not heard."""
        with self._lock:
            call = self._open.get(number)
            if self._ended is not None or call is None or call.answer is not None:
                return
            try:
                call.answer = Outgoing.of_answer(number, call.place, result)
            except SplitError as error:
                call.answer = Outgoing.of_answer(number, call.place, CallFailed(str(error)))
            self._store.release(call.charged)
            call.charged = 0
            self.answers += 1
            if self._line is not None:
                self._line.outbox.put(call.answer.frames(self.stamp, self._limits.chunk))

    def acknowledge(self, done: int) -> None:
        """Forget the answers up to ``done``.

        Raises:
            FrameRefused: they were not all given.
        """
        with self._lock:
            if self._ended is None:
                self._acknowledge(done)

    def end(self, error: SplitError) -> bool:
        """End it; what is served or answered from now on is void.  False: it had ended."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended = error
            line, self._line = self._line, None
            for call in self._open.values():
                self._store.release(call.charged)
            self._open.clear()
            if line is not None:
                line.outbox.close(self.stamp.refusal(error))
            return True

    def count(self) -> LinkStats:
        """What it has counted."""
        return LinkStats(0, 0, self.calls, self.answers, self.connections)

    def drained(self) -> None:
        """Wait until no call of an ended session is with ``serve`` any more."""
        with self._serving:
            pass

    def _check_number(self, number: int) -> None:
        if number > self.received + 1:
            raise FrameRefused(f"call {number} came, {self.received + 1} had to come")
        if number <= self.acknowledged:
            raise FrameRefused(f"call {number} was answered, and the answer has arrived")

    def _acknowledge(self, done: int) -> None:
        if done > self.received or any(
            call.answer is None for number, call in self._open.items() if number <= done
        ):
            raise FrameRefused(f"answers up to {done} are acknowledged that were never given")
        for number in range(self.acknowledged + 1, done + 1):
            self._open.pop(number)
        self.acknowledged = max(self.acknowledged, done)

    def _again(self, line: Line, message: Message, known: _Open) -> None:
        if known.digest != message.digest:
            raise FrameRefused(f"another call came as number {message.number} before")
        if known.answer is not None:
            line.outbox.put(known.answer.frames(self.stamp, self._limits.chunk))


def lost(why: str) -> SessionLost:
    """The session is no more."""
    return SessionLost(f"{why}; join anew")
