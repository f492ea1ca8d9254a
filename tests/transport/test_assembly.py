"""Frames that were cut, changed, swapped or sent twice make the same message, or none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flower_geo.calls import Call
from flower_geo.errors import SplitError
from flower_geo.transport import Limits
from flower_geo.transport.assembly import Assembler, Message
from flower_geo.transport.frames import Outgoing, Stamp, parse
from flower_geo.transport.spool import Store

STAMP, CHUNK = Stamp(b"k" * 16, 7, 1, 1), 16
LIMITS = Limits(spool=40, memory=90)
SIZES = st.lists(st.integers(0, 60), max_size=4)


def frames(sizes: list[int], number: int = 1) -> list[bytes]:
    blobs = {str(n): bytes(range(size)) for n, size in enumerate(sizes)}
    call = Call("forward", 1, 2, {"tokens": 3}, dict(blobs))
    return list(Outgoing.of_call(number, call).frames(STAMP, CHUNK))


def assemble(store: Store, data: list[bytes]) -> list[Message]:
    """The messages up to the first frame that is refused."""
    assembler, found = Assembler(store, CHUNK, lambda message: None), []
    try:
        for each in data:
            message = assembler.take(parse(each))
            if message is not None:
                found.append(message)
    except SplitError:
        pass
    finally:
        assembler.drop()
    return found


@given(SIZES, SIZES)
def test_messages_come_back(first: list[int], second: list[int]) -> None:
    store = Store(LIMITS)
    found = assemble(store, frames(first, 1) + frames(second, 2))
    assert [message.number for message in found] == [1, 2]
    for message, sizes in zip(found, (first, second), strict=True):
        assert (message.kind, message.step, message.micro) == ("forward", 1, 2)
        assert message.meta == {"tokens": 3}
        blobs = {name: bytes(blob) for name, blob in message.blobs.items()}
        assert blobs == {str(n): bytes(range(size)) for n, size in enumerate(sizes)}
        store.release(message.charged)
    assert store.held == 0


@given(SIZES, st.data())
def test_spoilt_frames(sizes: list[int], data: st.DataObject) -> None:
    whole = frames(sizes)
    spoilt = list(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(spoilt) - 1))
        match data.draw(st.sampled_from(["flip", "cut", "twice", "swap", "drop", "noise"])):
            case "flip" if spoilt[place]:
                at = data.draw(st.integers(0, len(spoilt[place]) - 1))
                bit = 1 << data.draw(st.integers(0, 7))
                changed = bytearray(spoilt[place])
                changed[at] ^= bit
                spoilt[place] = bytes(changed)
            case "cut":
                spoilt[place] = spoilt[place][: data.draw(st.integers(0, len(spoilt[place])))]
            case "twice":
                spoilt.insert(place, spoilt[place])
            case "swap":
                other = data.draw(st.integers(0, len(spoilt) - 1))
                spoilt[place], spoilt[other] = spoilt[other], spoilt[place]
            case "drop" if len(spoilt) > 1:
                del spoilt[place]
            case _:
                spoilt[place] = data.draw(st.binary(max_size=40))
    store = Store(LIMITS)
    for message in assemble(store, spoilt):
        blobs = {name: bytes(blob) for name, blob in message.blobs.items()}
        total = sum(map(len, blobs.values()))
        assert total == message.nbytes
        store.release(message.charged)
    assert store.held == 0, "what was refused half-way is still charged"
