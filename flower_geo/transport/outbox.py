"""What one stream has still to send, as the iterator that gRPC takes from."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from flower_geo.transport.meter import Meter

__all__ = ["Outbox"]


class Outbox:
    """Frames in the order they are to go: single frames first, then messages, beats between.

    gRPC takes one frame at a time and waits until the connection has taken it, so
    no more than that is ever in memory twice.

    Args:
        beat: seconds after which an idle stream gives a sign of life.
        make_beat: makes one, with the newest acknowledgement; takes no lock.

    Attributes:
        meter: counts what is sent; the stream's reader counts there what it receives.
    """

    def __init__(self, beat: float, make_beat: Callable[[], bytes]) -> None:
        self._beat, self._make_beat = beat, make_beat
        self._changed = threading.Condition()
        self._single: deque[bytes] = deque()
        self._messages: deque[Iterator[bytes]] = deque()
        self._nudged = self._closed = False
        self._due = time.monotonic() + beat
        self._handed: float | None = None
        self.meter = Meter()

    def put(self, message: Iterator[bytes]) -> None:
        """Queue the frames of a message; they are made when their turn comes."""
        with self._changed:
            if not self._closed:
                self._messages.append(message)
                self._changed.notify()

    def single(self, frame: bytes) -> None:
        """Queue one frame before all messages."""
        with self._changed:
            if not self._closed:
                self._single.append(frame)
                self._changed.notify()

    def nudge(self) -> None:
        """Send a beat as soon as possible: there is something to acknowledge."""
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def close(self, last: bytes | None = None) -> None:
        """End the stream, after one frame if it is given; what is queued is forgotten."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._messages.clear()
            if last is not None:
                if self._nudged:
                    self._single.append(self._make_beat())
                self._single.append(last)
            else:
                self._single.clear()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether nothing is taken any more."""
        return self._closed

    def stuck(self, now: float) -> float:
        """Seconds for which the other end has not taken what was handed out."""
        handed = self._handed
        return 0.0 if handed is None else now - handed

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        with self._changed:
            self._handed = None
            frame = self._next()
            now = time.monotonic()
            self._due, self._handed = now + self._beat, now
            self.meter.gave(len(frame))
            return frame

    def _next(self) -> bytes:
        while True:
            if self._single:
                return self._single.popleft()
            if self._closed:
                raise StopIteration
            now = time.monotonic()
            if self._nudged or now >= self._due:
                self._nudged = False
                return self._make_beat()
            if not self._messages:
                self._changed.wait(self._due - now)
                continue
            frame = next(self._messages[0], None)
            if frame is not None:
                return frame
            self._messages.popleft()
