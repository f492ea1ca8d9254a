"""A client that says what no client of ours would."""

from __future__ import annotations

import os
import queue
from types import TracebackType
from typing import Any, Self

import grpc

from flower_geo.calls import Call
from flower_geo.transport import Hello
from flower_geo.transport import split_pb2 as pb
from flower_geo.transport.channel import METHOD, SERVICE, dial
from flower_geo.transport.frames import Outgoing, Stamp
from flower_geo.transport.hello import hello_frame
from tests.transport.world import hello

__all__ = ["Raw"]


class Raw:
    """One stream; frames are given and taken one by one."""

    def __init__(self, address: str, site: str = "a", channel: grpc.Channel | None = None) -> None:
        self._own = None if channel else dial(address, None)
        self._queue: queue.Queue[bytes | None] = queue.Queue()
        method: Any = (channel or self._own).stream_stream(f"/{SERVICE}/{METHOD}")  # type: ignore[union-attr]
        self._rpc = self.call = method(iter(self._queue.get, None))
        self.hello: Hello = hello(site)
        self.stamp = Stamp(os.urandom(16), 0, 1, 1)

    def send(self, *frames: pb.Frame | bytes) -> None:
        """Send frames as they are."""
        for frame in frames:
            self._queue.put(frame if isinstance(frame, bytes) else frame.SerializeToString())

    def take(self) -> pb.Frame:
        """The next frame that is no beat."""
        while True:
            frame = pb.Frame.FromString(next(self.call))
            if not frame.HasField("beat"):
                return frame

    def opening(self) -> pb.Frame:
        """A hello."""
        return hello_frame(self.hello, self.stamp.session, 0, True, 0, [])

    def greet(self, fresh: bool = True, key: bytes | None = None, **changes: Any) -> pb.Frame:
        """Say hello; what the server says to it."""
        session = key or self.stamp.session
        frame = hello_frame(self.hello, session, 0, fresh, 0, [])
        for name, value in changes.items():
            setattr(frame.hello, name, value)
        self.send(frame)
        answer = self.take()
        if answer.HasField("welcome"):
            self.stamp = Stamp(session, answer.epoch, 1, 1)
        return answer

    def frames(self, number: int, call: Call, chunk: int) -> list[pb.Frame]:
        """The frames of a call, to be spoilt."""
        made = Outgoing.of_call(number, call).frames(self.stamp, chunk)
        return [pb.Frame.FromString(data) for data in made]

    def refusal(self) -> pb.Refusal:
        """The refusal that ends the stream; answers before it are passed over."""
        while True:
            frame = self.take()
            if frame.HasField("refusal"):
                assert next(self.call, None) is None
                return frame.refusal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.put(None)
        self._rpc.cancel()
        if self._own is not None:
            self._own.close()
