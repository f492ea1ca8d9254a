"""From calls and answers to frames."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from flower_geo.calls import Answer, Blob, Call, pack_meta
from flower_geo.errors import FrameRefused, SplitError
from flower_geo.transport import split_pb2 as pb
from flower_geo.transport.header import MAX_HEADER, describe
from flower_geo.transport.refusals import refusal
from flower_geo.transport.spool import flat_view, read_piece

try:  # compression has the same choice, but importing that package loads torch
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this machine
    from zlib import crc32

__all__ = ["ANSWER", "Outgoing", "Stamp", "crc32", "parse", "pieces"]

#: What an answer is, as a frame's kind.
ANSWER = "answer"


@dataclass(frozen=True)
class Stamp:
    """What every frame of a session carries."""

    session: bytes
    epoch: int
    round: int
    attempt: int

    def frame(self) -> pb.Frame:
        """A new frame."""
        return pb.Frame(
            session=self.session, epoch=self.epoch, round=self.round, attempt=self.attempt
        )

    def beat(self, done: int) -> bytes:
        """A sign of life that acknowledges all up to ``done``."""
        frame = self.frame()
        frame.beat.done = done
        return frame.SerializeToString()

    def bye(self) -> bytes:
        """The end of the session."""
        frame = self.frame()
        frame.bye.SetInParent()
        return frame.SerializeToString()

    def refusal(self, error: SplitError) -> bytes:
        """The end of the stream, and why."""
        frame = self.frame()
        frame.refusal.CopyFrom(refusal(error))
        return frame.SerializeToString()

    def check(self, frame: pb.Frame) -> None:
        """Refuse a frame of another session, life, round or try."""
        found = Stamp(frame.session, frame.epoch, frame.round, frame.attempt)
        if found != self:
            raise FrameRefused(
                f"a frame is of another session, epoch ({frame.epoch}, not {self.epoch}), "
                f"round ({frame.round}, not {self.round}) or attempt"
            )


@dataclass(frozen=True)
class Outgoing:
    """A call or an answer that waits to be sent, perhaps more than once."""

    number: int
    kind: str
    step: int = 0
    micro: int = 0
    meta: bytes = b""
    blobs: Mapping[str, memoryview] | None = None
    failure: SplitError | None = None

    @classmethod
    def of_call(cls, number: int, call: Call) -> Outgoing:
        """A call, under its number."""
        meta, views = pack_meta(call.meta), _views(call.blobs)
        return cls(number, call.kind, call.step, call.micro, meta, views)

    @classmethod
    def of_answer(cls, number: int, call: tuple[int, int], result: Answer | SplitError) -> Outgoing:
        """What came of call ``number``, which was of that step and micro-batch."""
        if isinstance(result, SplitError):
            return cls(number, ANSWER, *call, failure=result)
        return cls(number, ANSWER, *call, pack_meta(result.meta), _views(result.blobs))

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs."""
        return sum(map(len, (self.blobs or {}).values()))

    def frames(self, stamp: Stamp, chunk: int) -> Iterator[bytes]:
        """Its frames, made one at a time: what is sent is never twice in memory."""
        views = self.blobs or {}
        frame = self._frame(stamp)
        frame.head.meta = self.meta
        frame.crc = crc32(self.meta)
        for name, view in views.items():
            begin = read_piece(view, 0, min(MAX_HEADER, len(view)))
            frame.head.blobs.append(describe(name, len(view), begin).message())
        if self.failure is not None:
            frame.head.failure.CopyFrom(refusal(self.failure))
        yield frame.SerializeToString()
        for place, view in enumerate(views.values()):
            count = pieces(len(view), chunk)
            for index in range(count):
                start = index * chunk
                data = read_piece(view, start, min(start + chunk, len(view)))
                frame = self._frame(stamp)
                frame.crc = crc32(data)
                frame.chunk.blob, frame.chunk.index, frame.chunk.count = place, index, count
                frame.chunk.data = data
                yield frame.SerializeToString()

    def _frame(self, stamp: Stamp) -> pb.Frame:
        frame = stamp.frame()
        frame.number, frame.kind = self.number, self.kind
        frame.step, frame.micro = self.step, self.micro
        return frame


def _views(blobs: Mapping[str, Blob]) -> dict[str, memoryview]:
    return {name: flat_view(name, blob) for name, blob in blobs.items()}


def pieces(total: int, chunk: int) -> int:
    """Chunks that a blob of so many bytes is sent in."""
    return -(-total // chunk)


def parse(data: bytes) -> pb.Frame:
    """A frame from the wire.

    Raises:
        FrameRefused: the bytes are none.
    """
    try:
        return pb.Frame.FromString(data)
    except DecodeError:
        raise FrameRefused("what arrived is no frame") from None
