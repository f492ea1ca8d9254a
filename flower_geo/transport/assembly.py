"""From frames to calls and answers: nothing is taken that the head did not announce."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from flower_geo.calls import MAX_BLOBS, Blob, read_meta
from flower_geo.errors import FrameRefused, SplitError
from flower_geo.transport import split_pb2 as pb
from flower_geo.transport.frames import crc32, pieces
from flower_geo.transport.header import MAX_HEADER, BlobHeader, check_header, describe
from flower_geo.transport.refusals import read_refusal
from flower_geo.transport.spool import Sink, Store, flat_view, read_piece

__all__ = ["Assembler", "Message"]


@dataclass
class Message:
    """A call or an answer that arrives.

    Attributes:
        number, kind, step, micro: as in the frame.
        meta: the JSON object.
        headers: of the blobs, in order.
        blobs: those that are whole.
        failure: why the call was not carried out, in an answer.
        charged: bytes of memory the blobs were charged with.
        digest: of all that was announced and of every chunk's checksum.
    """

    number: int
    kind: str
    step: int
    micro: int
    meta: dict[str, Any]
    headers: list[BlobHeader]
    failure: SplitError | None = None
    blobs: dict[str, Blob] = field(default_factory=dict)
    charged: int = 0
    digest: bytes = b""

    @property
    def nbytes(self) -> int:
        """Bytes of all blobs, as announced."""
        return sum(header.total for header in self.headers)


class Assembler:
    """Puts one stream's frames together; one message at a time.

    Args:
        store: where the blobs go.
        chunk: bytes of every chunk but a blob's last.
        admit: called with what a head announces, before anything is kept; may refuse.
    """

    def __init__(self, store: Store, chunk: int, admit: Callable[[Message], None]) -> None:
        self._store, self._chunk, self._admit = store, chunk, admit
        self._message: Message | None = None
        self._sink: Sink | None = None
        self._seen, self._digest = 0, blake2b(digest_size=16)

    def take(self, frame: pb.Frame) -> Message | None:
        """Take a head or a chunk; the message, once it is whole.

        Raises:
            FrameRefused: the frame is damaged, or not the one that had to come.
        """
        if frame.WhichOneof("body") == "head":
            self._begin(frame)
        else:
            self._continue(frame)
        message = self._message
        while message and len(message.blobs) < len(message.headers) and self._advance(message):
            pass
        if message is None or len(message.blobs) < len(message.headers):
            return None
        message.digest, self._message = self._digest.digest(), None
        return message

    def drop(self) -> None:
        """Forget a message that will not become whole."""
        if self._sink is not None:
            self._sink.drop()
        if self._message is not None:
            self._store.release(self._message.charged)
        self._message = self._sink = None

    def _begin(self, frame: pb.Frame) -> None:
        if self._message is not None:
            raise FrameRefused(f"call {frame.number} begins within call {self._message.number}")
        head = frame.head
        if crc32(head.meta) != frame.crc:
            raise _damaged(f"the meta of call {frame.number}")
        if len(head.blobs) > MAX_BLOBS:
            raise FrameRefused(f"a call has {len(head.blobs)} blobs, more than {MAX_BLOBS}")
        headers = [check_header(found) for found in head.blobs]
        if len({header.name for header in headers}) != len(headers):
            raise FrameRefused(f"call {frame.number} names a blob twice")
        failure = read_refusal(head.failure) if head.HasField("failure") else None
        message = Message(
            frame.number, frame.kind, frame.step, frame.micro,
            read_meta(head.meta), headers, failure,
        )  # fmt: skip
        self._admit(message)
        about = f"{frame.number} {frame.kind} {frame.step} {frame.micro} {headers}"
        self._digest = blake2b(about.encode() + head.meta, digest_size=16)
        self._message, self._seen = message, 0

    def _advance(self, message: Message) -> bool:
        """Close a blob that is whole, or open the next; False when chunks have to come."""
        header = message.headers[len(message.blobs)]
        if self._sink is None:
            if header.total == 0:
                message.blobs[header.name] = b""
                return True
            self._sink, charged = self._store.sink(header.total)
            message.charged += charged
            return False
        if self._seen < pieces(header.total, self._chunk):
            return False
        blob, self._sink, self._seen = self._sink.finish(), None, 0
        view = flat_view(header.name, blob)
        begin = read_piece(view, 0, min(MAX_HEADER, len(view)))
        if describe(header.name, len(view), begin) != header:
            raise FrameRefused(f"blob {header.name!r} is not what its header says")
        message.blobs[header.name] = blob
        return True

    def _continue(self, frame: pb.Frame) -> None:
        message, chunk = self._message, frame.chunk
        if message is None or self._sink is None:
            raise FrameRefused(f"a chunk of call {frame.number} without a head that announced it")
        found = (frame.number, frame.kind, frame.step, frame.micro)
        if found != (message.number, message.kind, message.step, message.micro):
            raise FrameRefused(f"a chunk of call {frame.number} within call {message.number}")
        place = len(message.blobs)
        total = message.headers[place].total
        count = pieces(total, self._chunk)
        where = f"chunk {chunk.index} of {chunk.count} of blob {chunk.blob}"
        if chunk.count != count or chunk.index >= count:
            raise FrameRefused(f"{where} of a blob of {count} chunks")
        if (chunk.blob, chunk.index) != (place, self._seen):
            early = (chunk.blob, chunk.index) < (place, self._seen)
            raise FrameRefused(f"{where} {'came twice' if early else 'came out of order'}")
        size = min(self._chunk, total - chunk.index * self._chunk)
        if len(chunk.data) != size:
            raise FrameRefused(f"{where} has {len(chunk.data)} bytes, not {size}")
        if crc32(chunk.data) != frame.crc:
            raise _damaged(where)
        self._sink.write(chunk.data)
        self._digest.update(frame.crc.to_bytes(4, "little"))
        self._seen += 1


def _damaged(what: str) -> FrameRefused:
    return FrameRefused(
        f"{what} was changed on the way: its checksum does not match", retry=True, fault="network"
    )
