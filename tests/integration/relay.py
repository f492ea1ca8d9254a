"""A TCP relay between a site and its coordinator: counts bytes, delays, slows, cuts, swallows."""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

__all__ = ["Relay"]

#: Close at once and tell the other side by RST: linger on, for no time.
_ABORT = struct.pack("ii", 1, 0)
#: Pieces under way each way of a connection, at most: 16 MiB of them.
_PIECES = 256

#: (when it is due at the other end, piece).
_Line = queue.Queue[tuple[float, bytes]]


class Relay:
    """Listens on a free loopback port and passes every connection on.

    Args:
        target: ``host:port`` to pass connections on to.
        delay: seconds every piece is under way, each way; pieces overlap, as on a line.
        rate: bytes a second of all connections together, each way; 0 = as they come.

    Attributes:
        up, down: bytes passed on towards the target and back.
        open: while False, connections are refused and those there are cut.
        hole: while True, connections are taken and nothing comes through.
    """

    def __init__(self, target: str, delay: float = 0.0, rate: float = 0.0) -> None:
        host, _, port = target.rpartition(":")
        self.target, self.delay, self.rate = (host, int(port)), delay, rate
        self.up = self.down = 0
        self.open, self.hole = True, False
        self._lock = threading.Lock()
        self._free = {"up": 0.0, "down": 0.0}
        self._sockets: set[socket.socket] = set()
        self._aborted: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """``host:port`` to dial."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Break every connection and refuse new ones until :meth:`mend`."""
        self.open = False
        with self._lock:
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Break every connection by RST, as a middlebox that lost its table does."""
        with self._lock:
            gone, self._sockets = self._sockets, set()
            self._aborted |= gone
        for each in gone:
            with contextlib.suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                each.shutdown(socket.SHUT_RD)  # wakes who reads from it, and says nothing
        time.sleep(0.05)
        for each in gone:
            each.close()

    def blackhole(self) -> None:
        """Let nothing through, and say nothing, until :meth:`mend`."""
        self.hole = True

    def slow(self, delay: float = 0.0, rate: float = 0.0) -> None:
        """Delay every piece and limit the rate until :meth:`mend`."""
        self.delay, self.rate = delay, rate

    def mend(self) -> None:
        """Take connections again and pass everything on as it comes."""
        self.open, self.hole, self.delay, self.rate = True, False, 0.0, 0.0

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:  # closed
                return
            if not self.open:
                near.close()
                continue
            try:
                far = socket.create_connection(self.target)
            except OSError:
                near.close()
                continue
            with self._lock:
                self._sockets |= {near, far}
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                line: _Line = queue.Queue(_PIECES)
                self._start(self._take, source, line, way)
                self._start(self._give, line, source, sink, way)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _take(self, source: socket.socket, line: _Line, way: str) -> None:
        """Put every piece on the line, due when the delay is over; an empty one ends it."""
        with contextlib.suppress(OSError):
            while piece := source.recv(self._piece()):
                if self.rate:
                    time.sleep(self._turn(way, len(piece)))
                line.put((time.monotonic() + self.delay, piece))
        line.put((time.monotonic() + self.delay, b""))

    def _give(self, line: _Line, source: socket.socket, sink: socket.socket, way: str) -> None:
        """Pass on what has come to the line's end."""
        broken = False
        while True:
            due, piece = line.get()
            if not piece:
                break
            if broken:  # until whoever takes the pieces has seen it too
                continue
            time.sleep(max(0.0, due - time.monotonic()))
            self._wait_in_hole()
            with self._lock:
                setattr(self, way, getattr(self, way) + len(piece))
            try:
                sink.sendall(piece)
            except OSError:
                broken = True
                self._end(source, sink)
        time.sleep(max(0.0, due - time.monotonic()) if self.open and not broken else 0.0)
        self._wait_in_hole()
        self._end(source, sink)

    def _end(self, *ends: socket.socket) -> None:
        for each in ends:
            with contextlib.suppress(OSError):
                if each not in self._aborted:
                    each.shutdown(socket.SHUT_RDWR)

    def _turn(self, way: str, size: int) -> float:
        """Seconds until a piece is through; they pass one after another, as on a line."""
        with self._lock:
            now = time.monotonic()
            self._free[way] = max(now, self._free[way]) + size / self.rate
            return self._free[way] - now

    def _piece(self) -> int:
        return max(1024, min(1 << 16, int(self.rate / 8))) if self.rate else 1 << 16

    def _wait_in_hole(self) -> None:
        while self.hole and self.open:
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.mend()
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()
