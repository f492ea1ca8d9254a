"""One session at the site's end: keeps a stream up, sends calls again, hands answers on."""

from __future__ import annotations

import os
import random
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import grpc

from flower_geo.calls import Answer, Call
from flower_geo.errors import (
    CallFailed,
    DeadlineExceeded,
    FrameRefused,
    HandshakeRefused,
    SessionLost,
    SplitError,
)
from flower_geo.messages import one_line
from flower_geo.transport import split_pb2 as pb
from flower_geo.transport.assembly import Assembler, Message
from flower_geo.transport.channel import METHOD, SERVICE, dial
from flower_geo.transport.frames import ANSWER, Outgoing, Stamp, parse
from flower_geo.transport.hello import Hello, Joined, hello_frame
from flower_geo.transport.limits import MAX_CHUNK, Limits, LinkStats
from flower_geo.transport.meter import Meter
from flower_geo.transport.outbox import Outbox
from flower_geo.transport.refusals import read_refusal
from flower_geo.transport.spool import Store

__all__ = ["Link"]

#: Seconds before the first and, at most, before any later try to connect.
FIRST_WAIT, LONGEST_WAIT = 0.05, 5.0


@dataclass
class _Waiting:
    """A call whose answer is not there yet."""

    outgoing: Outgoing
    future: Future[Answer]
    due: float


class Link:
    """One session with the cloud; see ``SplitClient``, which has one at a time.

    Args:
        address: ``host:port``.
        hello: what to say; its ``deadline`` is how long to go without a connection.
        limits: bounds and times.
        root_certificate: PEM to trust; None for no encryption.
    """

    def __init__(
        self, address: str, hello: Hello, limits: Limits, root_certificate: bytes | None
    ) -> None:
        self._address, self._hello, self._limits = address, hello, limits
        self._root = root_certificate
        self._stamp = Stamp(os.urandom(16), 0, hello.round, hello.attempt)
        self._store = Store(limits)
        self._changed = threading.Condition()
        self._joined: Joined | None = None
        self._credit = pb.Welcome()
        self._waiting: dict[int, _Waiting] = {}
        self._sizes: dict[int, int] = {}
        self._also: set[int] = set()
        self._next, self._done = 1, 0
        self._outbox: Outbox | None = None
        self._call: Any = None
        self._error: SplitError | None = None
        self._closing = False
        self._heard = time.monotonic()
        # An outage ends with a welcome; but after a refusal, such as of a chunk that was
        # changed on the way, only with an answer, or it would be refused for ever.
        self._up = self._refused = False
        self._down: float | None = time.monotonic()
        self._trouble = "nothing was heard from it"
        self._meters: list[Meter] = []
        self._answers = 0
        self._threads = [
            threading.Thread(target=self._run, name="split-link", daemon=True),
            threading.Thread(target=self._look_after, name="split-link-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def joined(self) -> Joined:
        """Wait to be let in.

        Raises:
            SplitError: refused, or not within the hello's deadline.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._joined or self._error or self._closing, self._hello.deadline
            )
            if self._error is not None:
                raise self._error
            if self._joined is None:
                raise DeadlineExceeded(
                    f"{self._address} did not let site {self._hello.site!r} in within "
                    f"{self._hello.deadline:g} s: {self._trouble}"
                )
            return self._joined

    def submit(self, call: Call) -> Future[Answer]:
        """Send a call once there is credit for it.

        Raises:
            FrameRefused: it is larger than the cloud takes.
            DeadlineExceeded: there was no credit in time.
            SplitError: what ended the session.
        """
        due = time.monotonic() + self._limits.call
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()
        outgoing = Outgoing.of_call(0, call)
        size = outgoing.nbytes
        with self._changed:
            if self._joined is None:
                raise self._error or SessionLost("the site has not been let in yet; join first")
            if size > self._credit.bytes:
                raise FrameRefused(
                    f"a call of {size} bytes is larger than the {self._credit.bytes} the cloud "
                    "takes at once; raise its limit `bytes`, or send less"
                )
            while self._error is None and not self._has_credit(size):
                if not self._changed.wait(due - time.monotonic()) and time.monotonic() >= due:
                    raise DeadlineExceeded(
                        f"no earlier call was answered within {self._limits.call:g} s",
                        fault="cloud",
                    )
            if self._error is not None:
                raise self._error
            number, self._next = self._next, self._next + 1
            outgoing = replace(outgoing, number=number)
            self._waiting[number] = _Waiting(outgoing, future, due)
            self._sizes[number] = size
            if self._outbox is not None:
                self._outbox.put(outgoing.frames(self._stamp, self._credit.chunk))
        return future

    def close(self, farewell: bool = True, seconds: float = 5.0) -> None:
        """End the session; with ``farewell`` the cloud is told, if it can be reached now."""
        with self._changed:
            self._closing = True
            outbox, call = self._outbox, self._call
            self._changed.notify_all()
            if farewell and outbox is not None and self._error is None:
                outbox.close(self._stamp.bye())
            elif call is not None:
                call.cancel()
        self._threads[0].join(seconds)
        with self._changed:
            call = self._call
        if call is not None:
            call.cancel()
        for thread in self._threads:
            thread.join(seconds)
        self._fail(SessionLost("the session was closed", fault="site", retry=False))

    def stats(self) -> LinkStats:
        """What was counted so far."""
        with self._changed:
            return LinkStats(
                sum(meter.sent for meter in self._meters),
                sum(meter.received for meter in self._meters),
                self._next - 1,
                self._answers,
                len(self._meters),
            )

    # Connections

    def _run(self) -> None:
        wait = 0.0
        while not self._over():
            try:
                self._converse()
                self._trouble = "it ended the stream"
            except grpc.RpcError as error:
                if not self._excusable(error):
                    return
            except SplitError as error:
                if isinstance(error, SessionLost) or not error.retry:
                    self._fail(error)
                    return
                self._trouble, self._refused = str(error), True
            except Exception as error:  # no thread dies without a word to who waits
                what = f"{type(error).__name__}: {error}"
                self._fail(CallFailed(f"the stream failed at this site: {what}", fault="site"))
                raise
            now = time.monotonic()
            with self._changed:
                if self._down is None:
                    self._down, wait = now, 0.0
                self._changed.wait_for(lambda: self._closing or self._error, wait)
            wait = min(LONGEST_WAIT, max(FIRST_WAIT, 2 * wait)) * random.uniform(0.5, 1.0)

    def _over(self) -> bool:
        with self._changed:
            return self._closing or self._error is not None

    def _excusable(self, error: grpc.RpcError) -> bool:
        """Whether a connection's end is one to come back from."""
        found: Any = error  # the types do not know that it is the call itself
        code, said = found.code(), one_line(str(found.details()))
        if code is grpc.StatusCode.UNIMPLEMENTED:
            text = f"{self._address} is no server of split learning: {said}"
            self._fail(HandshakeRefused(text, fault="cloud"))
            return False
        if "CERTIFICATE_VERIFY_FAILED" in said:
            text = f"{self._address} shows a certificate that is not the one to trust: {said}"
            self._fail(HandshakeRefused(text, fault="cloud"))
            return False
        if code is not grpc.StatusCode.CANCELLED:
            self._trouble = said
        return True

    def _converse(self) -> None:
        """Open a stream and read it to its end."""
        outbox = Outbox(self._limits.beat, lambda: self._stamp.beat(self._done))
        with self._changed:
            also = sorted(self._also)
            fresh = self._joined is None
            stamp = self._stamp
            hello = hello_frame(self._hello, stamp.session, stamp.epoch, fresh, self._done, also)
            self._heard = time.monotonic()
            self._meters.append(outbox.meter)
        outbox.single(hello.SerializeToString())
        channel = dial(self._address, self._root)
        try:
            method: Any = channel.stream_stream(f"/{SERVICE}/{METHOD}")
            call = method(iter(outbox))
            with self._changed:
                self._call = call
                if self._closing or self._error is not None:
                    return
            assembler = Assembler(self._store, MAX_CHUNK, self._admit)
            try:
                for data in call:
                    self._heard = time.monotonic()
                    outbox.meter.took(len(data))
                    assembler = self._take(parse(data), outbox, assembler)
            finally:
                assembler.drop()
        finally:
            with self._changed:
                self._up, self._outbox, self._call = False, None, None
            outbox.close()
            channel.close()

    def _take(self, frame: pb.Frame, outbox: Outbox, assembler: Assembler) -> Assembler:
        body = frame.WhichOneof("body")
        if body == "refusal":
            raise read_refusal(frame.refusal)
        if body == "welcome":
            self._welcomed(frame, outbox)
            return Assembler(self._store, self._credit.chunk, self._admit)
        if self._outbox is None:
            if body != "beat":
                raise FrameRefused(f"a {body} frame came before the welcome", fault="cloud")
            return assembler
        self._stamp.check(frame)
        if body in ("head", "chunk"):
            message = assembler.take(frame)
            if message is not None:
                self._answered(message, outbox)
        elif body not in ("beat", "bye"):
            raise FrameRefused(f"a {body} frame comes from no cloud", fault="cloud")
        return assembler

    def _welcomed(self, frame: pb.Frame, outbox: Outbox) -> None:
        """The stream is up: send what the cloud lacks."""
        welcome = frame.welcome
        if not 1 <= welcome.chunk <= MAX_CHUNK or not welcome.in_flight:
            raise FrameRefused("the cloud's welcome gives no credit", fault="cloud")
        with self._changed:
            stamp = Stamp(self._stamp.session, frame.epoch, self._hello.round, self._hello.attempt)
            if self._joined is None:
                self._joined, self._stamp = Joined(frame.epoch, welcome.step), stamp
            stamp.check(frame)
            self._stamp.check(frame)
            if welcome.done >= self._next:
                raise FrameRefused("the cloud has calls that were not sent", fault="cloud")
            self._credit = welcome
            self._up, self._outbox = True, outbox
            if not self._refused:
                self._down = None
            for number, waiting in sorted(self._waiting.items()):
                if number > welcome.done:
                    outbox.put(waiting.outgoing.frames(self._stamp, welcome.chunk))
            self._changed.notify_all()

    # Calls and answers

    def _has_credit(self, size: int) -> bool:
        out = sum(self._sizes.values())
        return (
            self._next - self._done <= self._credit.in_flight and out + size <= self._credit.bytes
        )

    def _admit(self, message: Message) -> None:
        with self._changed:
            if message.kind != ANSWER or not 0 < message.number < self._next:
                raise FrameRefused(f"an answer to call {message.number} was not asked for")
            if message.nbytes > self._limits.bytes:
                raise FrameRefused(
                    f"the answer to call {message.number} has {message.nbytes} bytes, more than "
                    f"the {self._limits.bytes} this site takes; raise its limit `bytes`",
                    fault="cloud",
                )

    def _answered(self, message: Message, outbox: Outbox) -> None:
        self._store.release(message.charged)
        with self._changed:
            self._refused, self._down = False, None
            waiting = self._waiting.pop(message.number, None)
            if message.number > self._done:
                self._also.add(message.number)
            self._answers += waiting is not None
            while self._done + 1 in self._also:
                self._done += 1
                self._also.discard(self._done)
                self._sizes.pop(self._done, None)
            self._changed.notify_all()
        outbox.nudge()
        if waiting is None:
            return
        try:
            result = message.failure or Answer(message.meta, message.blobs)
        except SplitError as error:
            result = error
        if isinstance(result, SplitError):
            waiting.future.set_exception(result)
        else:
            waiting.future.set_result(result)

    def _fail(self, error: SplitError) -> None:
        """End the session with an error; every call without an answer gets it."""
        with self._changed:
            if self._error is None:
                self._error = error
            waiting, self._waiting = self._waiting, {}
            self._changed.notify_all()
        for each in waiting.values():
            each.future.set_exception(error)

    # Time

    def _look_after(self) -> None:
        tick = max(0.02, min(0.25, self._limits.beat / 2))
        while not self._over():
            now = time.monotonic()
            with self._changed:
                late = [n for n, each in self._waiting.items() if each.due <= now]
                # Its number stays taken: should the answer come after all, it is acknowledged.
                expired = [self._waiting.pop(number) for number in late]
                call, outbox = self._call, self._outbox
                down = 0.0 if self._up or self._down is None else now - self._down
            for each in expired:
                each.future.set_exception(
                    DeadlineExceeded(
                        f"the cloud did not answer call {each.outgoing.number} "
                        f"({each.outgoing.kind}) within {self._limits.call:g} s",
                        fault="cloud",
                    )
                )
            stuck = outbox.stuck(now) if outbox is not None else 0.0
            if call is not None and max(now - self._heard, stuck) > self._limits.silence:
                self._trouble = f"nothing came through for {self._limits.silence:g} s"
                call.cancel()
            if down > self._hello.deadline:
                self._fail(
                    DeadlineExceeded(
                        f"no connection to {self._address} for {self._hello.deadline:g} s: "
                        f"{self._trouble}"
                    )
                )
                if call is not None:
                    call.cancel()
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._error, tick)
