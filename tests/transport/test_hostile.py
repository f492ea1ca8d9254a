"""Everything a stream may be sent: refused by a typed error, and the others go on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest

from flower_geo.calls import Answer, Call
from flower_geo.errors import FrameRefused, SplitError
from flower_geo.transport import Limits, SplitServer
from flower_geo.transport import split_pb2 as pb
from flower_geo.transport.channel import dial
from flower_geo.transport.frames import crc32
from flower_geo.transport.limits import MAX_FRAME
from tests.transport.raw import Raw
from tests.transport.world import Notes, client, serving

CHUNK = 1024
LIMITS = Limits(
    chunk=CHUNK, in_flight=3, bytes=10_000, beat=20.0, silence=60.0, call=30.0, greeting=5.0
)
TWO = Call("forward", 1, 0, {}, {"x": b"x" * 1500, "y": b"y" * 100})


@pytest.fixture
def world() -> Iterator[tuple[SplitServer, str, Notes]]:
    """A server at which an honest site works before and after."""
    notes = Notes()
    with serving(notes, LIMITS) as (server, address), client(address, "honest") as site:
        site.join()
        assert site.submit(TWO).result(5).blobs
        yield server, address, notes
        assert site.submit(TWO).result(5).blobs
        assert site.stats().connections == 1, "the honest site was disturbed"
        assert server.store.held == 0


def spoil(change: Callable[[list[pb.Frame]], None]) -> Callable[[Raw], None]:
    """Send call 1, changed."""

    def send(raw: Raw) -> None:
        frames = raw.frames(1, TWO, CHUNK)
        change(frames)
        raw.send(*frames)

    return send


def in_blob(**values: object) -> Callable[[Raw], None]:
    """Send call 1 with a blob announced otherwise than it is."""

    def change(frames: list[pb.Frame]) -> None:
        blob = frames[0].head.blobs[0]
        for name, value in values.items():
            if name == "shape":
                blob.ClearField("shape")
                blob.shape.extend(value)  # type: ignore[arg-type]
            else:
                setattr(blob, name, value)

    return spoil(change)


def in_frame(place: int, **values: object) -> Callable[[Raw], None]:
    """Send call 1 with fields of a frame changed."""

    def change(frames: list[pb.Frame]) -> None:
        for name, value in values.items():
            setattr(frames[place], name, value)

    return spoil(change)


def in_chunk(place: int, **values: object) -> Callable[[Raw], None]:
    """Send call 1 with fields of a chunk changed."""

    def change(frames: list[pb.Frame]) -> None:
        for name, value in values.items():
            setattr(frames[place].chunk, name, value)
        frames[place].crc = crc32(frames[place].chunk.data)

    return spoil(change)


def meta(text: bytes) -> Callable[[Raw], None]:
    """Send call 1 with another meta."""

    def change(frames: list[pb.Frame]) -> None:
        frames[0].head.meta, frames[0].crc = text, crc32(text)

    return spoil(change)


def body(name: str) -> Callable[[Raw], None]:
    """Send a frame that no site sends within a session."""

    def send(raw: Raw) -> None:
        frame = raw.stamp.frame()
        getattr(frame, name).SetInParent()
        raw.send(frame)

    return send


def beat(done: int) -> Callable[[Raw], None]:
    """Acknowledge what never was."""
    return lambda raw: raw.send(raw.stamp.beat(done))


def all_at_once(raw: Raw) -> None:
    """More calls than there are credits, without a word of acknowledgement."""
    for number in range(1, 6):
        raw.send(*raw.frames(number, Call("step", number), CHUNK))


def too_many_bytes(raw: Raw) -> None:
    """Each call is within the credit, all of them are not."""
    for number in range(1, 4):
        raw.send(*raw.frames(number, Call("forward", number, 0, {}, {"x": b"x" * 4000}), CHUNK))


def another_content(raw: Raw) -> None:
    """A number again, with another call."""
    raw.send(*raw.frames(1, TWO, CHUNK))
    raw.send(*raw.frames(1, Call("forward", 1, 0, {"x": 1}, TWO.blobs), CHUNK))


def long_ago(raw: Raw) -> None:
    """A call again whose answer was acknowledged."""
    raw.send(*raw.frames(1, TWO, CHUNK))
    while not raw.take().HasField("chunk"):
        pass
    for _ in range(2):
        raw.take()
    raw.send(raw.stamp.beat(1), *raw.frames(1, TWO, CHUNK))


def swap(frames: list[pb.Frame]) -> None:
    frames[1], frames[2] = frames[2], frames[1]


def twice(frames: list[pb.Frame]) -> None:
    frames.insert(2, frames[1])


def name_twice(frames: list[pb.Frame]) -> None:
    frames[0].head.blobs[1].name = "x"


def many_blobs(frames: list[pb.Frame]) -> None:
    frames[0].head.blobs.extend([frames[0].head.blobs[0]] * 300)


def failed(frames: list[pb.Frame]) -> None:
    frames[0].head.failure.error = "CallFailed"


def without_head(frames: list[pb.Frame]) -> None:
    del frames[0]


def head_twice(frames: list[pb.Frame]) -> None:
    frames.insert(1, frames[0])


BAD: dict[str, tuple[Callable[[Raw], None], str]] = {
    "garbage": (lambda raw: raw.send(b"\xff" * 100), "no frame"),
    "empty": (lambda raw: raw.send(raw.stamp.frame()), "a None frame"),
    "hello-again": (body("hello"), "a hello frame"),
    "welcome": (body("welcome"), "a welcome frame"),
    "refusal": (body("refusal"), "a refusal frame"),
    "session": (in_frame(0, session=b"0" * 16), "another session"),
    "epoch": (in_frame(0, epoch=8), "epoch"),
    "round": (in_frame(1, round=2), "round"),
    "attempt": (in_frame(1, attempt=2), "attempt"),
    "number-0": (in_frame(0, number=0), "answered"),
    "number-gap": (in_frame(0, number=2), "1 had to come"),
    "number-huge": (in_frame(0, number=2**64 - 1), "1 had to come"),
    "kind": (in_frame(0, kind="pull"), "kind is 'pull'"),
    "answer": (in_frame(0, kind="answer"), "kind is 'answer'"),
    "failure": (spoil(failed), "says that it failed"),
    "step": (in_frame(0, step=2**60), "can be of step"),
    "meta-crc": (in_frame(0, crc=1), "changed on the way"),
    "meta-text": (meta(b"[1]"), "JSON object"),
    "meta-deep": (meta(b"[" * 60_000), "JSON object"),
    "meta-long": (meta(b'{"x":"' + b"a" * 70_000 + b'"}'), "meta has"),
    "blob-name": (in_blob(name=""), "no name"),
    "blob-name-control": (in_blob(name="\x1b[2J"), "no name"),
    "blob-twice": (spoil(name_twice), "names a blob twice"),
    "blob-many": (spoil(many_blobs), "blobs, more than"),
    "shape-huge": (in_blob(dtype="float32", shape=[2**63, 2**63]), "cannot be a float32"),
    "shape-zero": (in_blob(dtype="float32", shape=[0, 2**63]), "cannot be a float32"),
    "shape-other": (in_blob(dtype="float32", shape=[375]), "not what its header says"),
    "shape-bytes": (in_blob(shape=[1501]), "cannot be a bytes"),
    "shape-many": (in_blob(dtype="float32", shape=[1] * 17), "17 dimensions"),
    "dtype": (in_blob(dtype="complex64"), "cannot be a complex64"),
    "total-huge": (in_blob(total=2**63, shape=[2**63]), "beyond the credit"),
    "total-shorter": (in_blob(total=1024, shape=[1024]), "of 2 of blob 0"),
    "total-longer": (in_blob(total=1501, shape=[1501]), "bytes, not 477"),
    "chunk-crc": (in_frame(1, crc=1), "changed on the way"),
    "chunk-k-n": (in_chunk(1, index=2), "chunk 2 of 2"),
    "chunk-n": (in_chunk(1, count=2**40), "of a blob of 2 chunks"),
    "chunk-blob": (in_chunk(1, blob=1), "out of order"),
    "chunk-short": (in_chunk(1, data=b"x" * 1023), "has 1023 bytes"),
    "chunk-long": (in_chunk(1, data=b"x" * 1025), "has 1025 bytes"),
    "chunk-empty": (in_chunk(2, data=b""), "has 0 bytes"),
    "chunk-number": (in_frame(1, number=2), "within call 1"),
    "chunk-step": (in_frame(1, step=2), "within call 1"),
    "chunk-order": (spoil(swap), "out of order"),
    "chunk-twice": (spoil(twice), "came twice"),
    "chunk-alone": (spoil(without_head), "without a head"),
    "head-twice": (spoil(head_twice), "begins within"),
    "credit-calls": (all_at_once, "beyond the credit of 3 calls"),
    "credit-bytes": (too_many_bytes, "10000 bytes are outstanding"),
    "ack-ahead": (beat(1), "never given"),
    "ack-huge": (beat(2**63), "never given"),
    "again-other": (another_content, "another call came"),
    "again-acknowledged": (long_ago, "the answer has arrived"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_frames(world: tuple[SplitServer, str, Notes], name: str) -> None:
    _, address, notes = world
    send, words = BAD[name]
    with Raw(address) as raw:
        assert raw.greet().HasField("welcome")
        send(raw)
        refusal = raw.refusal()
    assert words in refusal.message
    assert refusal.error == FrameRefused.__name__
    where = (True, "network") if "crc" in name else (False, "site")
    assert (refusal.retry, refusal.fault) == where
    served = [call for call in notes.calls if call[0] == "a"]
    assert len(served) <= 4
    assert len(set(served)) == len(served)


def test_a_call_that_came_before_is_answered_again(
    world: tuple[SplitServer, str, Notes],
) -> None:
    _, address, notes = world
    with Raw(address) as raw:
        raw.greet()
        first = raw.frames(1, TWO, CHUNK)
        raw.send(*first)
        answer = [raw.take() for _ in range(4)]
        raw.send(*first)
        assert [raw.take() for _ in range(4)] == answer
    assert notes.calls.count(("a", "forward", 1, 0)) == 1


def first(raw: Raw, frame: bytes) -> pb.Frame:
    """Begin with something else than a hello."""
    raw.send(frame)
    return raw.take()


GREETINGS: dict[str, tuple[Callable[[Raw], pb.Frame], str]] = {
    "protocol": (lambda raw: raw.greet(protocol=9), "HandshakeRefused"),
    "site": (lambda raw: raw.greet(site="../a"), "HandshakeRefused"),
    "run": (lambda raw: raw.greet(run="x" * 100), "HandshakeRefused"),
    "key": (lambda raw: raw.greet(key=b"short"), "HandshakeRefused"),
    "token": (lambda raw: raw.greet(token="1" * 10_000), "HandshakeRefused"),
    "unknown": (lambda raw: raw.greet(fresh=False), "SessionLost"),
    "no-hello": (lambda raw: first(raw, raw.stamp.beat(0)), "HandshakeRefused"),
    "garbage": (lambda raw: first(raw, b"\xff"), "FrameRefused"),
}


@pytest.mark.parametrize("name", GREETINGS)
def test_bad_greetings(world: tuple[SplitServer, str, Notes], name: str) -> None:
    greet, error = GREETINGS[name]
    with Raw(world[1]) as raw:
        assert greet(raw).refusal.error == error
    assert [hello.site for hello in world[2].joins] == ["honest"]


def test_a_session_is_its_sites_alone(world: tuple[SplitServer, str, Notes]) -> None:
    with Raw(world[1], "a") as one, Raw(world[1], "b") as two:
        one.greet()
        assert two.greet(key=one.stamp.session).refusal.error == "HandshakeRefused"
        one.send(*one.frames(1, Call("step", 1), CHUNK))
        assert one.take().kind == "answer"


def test_frames_after_goodbye(world: tuple[SplitServer, str, Notes]) -> None:
    _, address, notes = world
    with Raw(address) as raw:
        raw.greet()
        raw.send(raw.stamp.bye(), *raw.frames(1, TWO, CHUNK))
        assert raw.take().HasField("bye")
        assert next(raw.call, None) is None
    for fresh in (False, True):  # nor does the key open anything again
        with Raw(address) as again:
            assert again.greet(fresh, raw.stamp.session).refusal.error == "SessionLost"
    assert notes.left == ["a"]
    assert all(call[0] == "honest" for call in notes.calls)


def test_a_frame_too_large_is_not_taken(world: tuple[SplitServer, str, Notes]) -> None:
    with Raw(world[1]) as raw:
        raw.greet()
        raw.send(b"\x0a" * (MAX_FRAME + 1))
        with pytest.raises(grpc.RpcError) as caught:
            raw.take()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_who_does_not_greet_is_sent_away() -> None:
    limits = Limits(greeting=0.3, beat=0.2, silence=0.5)
    with serving(Notes(), limits) as (server, address), Raw(address) as raw:
        began = time.monotonic()
        assert raw.refusal().error == "HandshakeRefused"
        assert time.monotonic() - began < 3
        assert server.stats().sessions == 0


def test_a_thousand_streams() -> None:
    limits = Limits(
        chunk=CHUNK, waiting=10, sessions=4, greeting=5.0, beat=20.0, silence=60.0, call=30.0
    )
    with serving(Notes(), limits) as (server, address), client(address, "honest") as site:
        site.join()
        channels = [dial(address, None) for _ in range(5)]
        streams = [Raw(address, channel=channels[n % 5]) for n in range(1000)]
        before = threading.active_count()
        time.sleep(0.5)
        assert server.stats().streams <= 11
        assert threading.active_count() < before + 40
        assert site.submit(TWO).result(5).blobs
        for raw in streams:
            raw.__exit__(None, None, None)
        for channel in channels:
            channel.close()
        with client(address, "late") as late:
            late.join()
            assert late.submit(TWO).result(5).blobs


def test_who_never_reads_holds_nothing_up() -> None:
    big = b"z" * 200_000
    notes = Notes(lambda site, call: Answer({}, {"z": big} if site == "a" else {}))
    limits = Limits(in_flight=64, beat=0.2, silence=1.0, call=30.0, linger=0.5, chunk=2**16)
    with serving(notes, limits) as (server, address), client(address, "honest") as site:
        site.join()
        with Raw(address) as raw:
            raw.greet()
            raw.call = iter(())  # from here on it takes nothing
            for number in range(1, 65):
                raw.send(*raw.frames(number, Call("step", number), 2**16))
            end = time.monotonic() + 10
            while "a" not in notes.left and time.monotonic() < end:
                assert site.submit(Call("step", 1)).result(5) == Answer()
                raw.send(raw.stamp.beat(0))  # it is there, it only does not read
                time.sleep(0.05)
        assert notes.left == ["a"]
        assert server.stats().sessions == 1


def test_refusals_reach_the_clients_future() -> None:
    notes = Notes(lambda site, call: SplitError("odd") if call.step == 2 else Answer({}))
    with serving(notes) as (_, address), client(address) as site:
        site.join()
        with pytest.raises(SplitError, match="odd"):
            site.submit(Call("step", 2)).result(5)
        assert site.submit(Call("step", 3)).result(5) == Answer({})
