"""A TCP relay that reads HTTP/2 and cuts the connection at a chosen frame of the stream."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Literal, NamedTuple, Self

__all__ = ["Cut", "Cutter"]

_ABORT = struct.pack("ii", 1, 0)
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA = 0


class Cut(NamedTuple):
    """Where the connection breaks: ``up`` is towards the server, messages count from 1.

    ``spoil`` changes the message's last byte instead.
    """

    way: Literal["up", "down"]
    message: int
    when: Literal["before", "within", "after", "spoil"]


class _Messages:
    """Counts the gRPC messages in the DATA frames of one direction."""

    def __init__(self) -> None:
        self.begun = self.whole = 0
        self._prefix, self._left = b"", 0

    def step(self, data: bytes) -> int:
        """Take bytes up to the next boundary of a message; how many they are."""
        if self._left:
            size = min(self._left, len(data))
            self._left -= size
            self.whole += self._left == 0
            return size
        size = min(5 - len(self._prefix), len(data))
        if not self._prefix:
            self.begun += 1
        self._prefix += data[:size]
        if len(self._prefix) == 5:
            self._left = struct.unpack(">I", self._prefix[1:])[0]
            self._prefix = b""
            self.whole += self._left == 0
        return size


class Cutter:
    """Passes connections on; breaks the first one that reaches ``cut``, once.

    Args:
        target: ``host:port`` to pass connections on to.
        cut: where to break.
        abort: break by RST.
        idle: break a connection after so many seconds without a byte in either direction.
        every: do so to every connection.

    Attributes:
        up, down: messages that passed whole over the first connection.
        sizes: bytes that passed, by direction, over all connections.
        connections: taken so far.
        done: set once it was cut.
    """

    def __init__(
        self,
        target: str,
        cut: Cut | None = None,
        abort: bool = False,
        idle: float | None = None,
        every: bool = False,
    ) -> None:
        host, _, port = target.rpartition(":")
        self._target, self.cut, self._abort = (host, int(port)), cut, abort
        self._idle, self._every = idle, every
        self.messages = {"up": 0, "down": 0}
        self.sizes = {"up": 0, "down": 0}
        self.connections = 0
        self.done = threading.Event()
        self._sockets: list[socket.socket] = []
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        """``host:port`` to dial."""
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self.connections += 1
            first = self.connections == 1 or self._every
            pair = [near, far]
            for each in pair:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.settimeout(self._idle)
            self._sockets += pair
            for source, sink, way in ((near, far, "up"), (far, near, "down")):
                thread = threading.Thread(
                    target=self._pass, args=(source, sink, way, first, pair), daemon=True
                )
                self._threads.append(thread)
                thread.start()

    def _pass(
        self, source: socket.socket, sink: socket.socket, way: str, first: bool, pair: list
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            if way == "up":
                self._send(sink, way, _exactly(source, len(_PREFACE)))
            messages = _Messages()
            while True:
                head = _exactly(source, 9)
                body = _exactly(source, int.from_bytes(head[:3], "big"))
                if first and head[3] == _DATA:
                    self._pass_data(sink, way, head, body, messages)
                else:
                    self._send(sink, way, head + body)
        self._break(pair)

    def _pass_data(
        self, sink: socket.socket, way: str, head: bytes, body: bytes, messages: _Messages
    ) -> None:
        """Pass a DATA frame on, split where a message begins or ends."""
        while True:
            number, at_boundary = messages.whole + 1, messages.begun == messages.whole
            if at_boundary and body and self._is(way, number, "before"):
                raise EOFError
            size = messages.step(body)
            rest = body[size:]
            flags = bytes([head[4] if not rest else 0])
            piece = body[: size // 2] if self._is(way, messages.begun, "within") else body[:size]
            cut = len(piece) < size
            if messages.whole == messages.begun and self._is(way, messages.whole, "spoil"):
                piece = piece[:-1] + bytes([piece[-1] ^ 1])
                self.done.set()
            frame = len(piece).to_bytes(3, "big") + head[3:4] + flags + head[5:] + piece
            self._send(sink, way, frame)
            self.messages[way] = messages.whole
            if cut or (messages.whole == messages.begun and self._is(way, messages.whole, "after")):
                raise EOFError
            body = rest
            if not body:
                return

    def _is(self, way: str, message: int, when: str) -> bool:
        again = self._every or not self.done.is_set()
        return self.cut == (way, message, when) and again

    def _send(self, sink: socket.socket, way: str, data: bytes) -> None:
        sink.sendall(data)
        with self._lock:
            self.sizes[way] += len(data)

    def _break(self, pair: list) -> None:
        self.done.set()
        for each in pair:
            with contextlib.suppress(OSError):
                if self._abort:
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
                each.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._break(self._sockets)
        for thread in self._threads:
            thread.join(5)
        for each in self._sockets:
            each.close()


def _exactly(source: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        piece = source.recv(size - len(found))
        if not piece:
            raise EOFError
        found += piece
    return found
