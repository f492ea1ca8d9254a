"""A TCP relay between a site and its coordinator: counts bytes, delays, cuts."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["Relay"]


class Relay:
    """Listens on a free loopback port and passes every connection on.

    Args:
        target: ``host:port`` to pass connections on to.
        delay: seconds every piece waits, each way.

    Attributes:
        up, down: bytes passed on towards the target and back.
        open: while False, connections are refused and those there are cut.
    """

    def __init__(self, target: str, delay: float = 0.0) -> None:
        host, _, port = target.rpartition(":")
        self.target, self.delay = (host, int(port)), delay
        self.up = self.down = 0
        self.open = True
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
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

    def mend(self) -> None:
        """Take connections again."""
        self.open = True

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
                thread = threading.Thread(target=self._pass, args=(source, sink, way), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                if self.delay:
                    time.sleep(self.delay)
                sink.sendall(piece)
                with self._lock:
                    setattr(self, way, getattr(self, way) + len(piece))
        for each in (source, sink):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()
