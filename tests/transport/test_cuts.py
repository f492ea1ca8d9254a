"""Whatever frame the connection breaks at: the same answers, and each call served once."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from flower_geo.calls import Answer, Blob, Call
from flower_geo.errors import DeadlineExceeded
from flower_geo.transport import Limits
from tests.transport.cutter import Cut, Cutter
from tests.transport.world import Notes, client, serving

SMALL = Limits(chunk=64, beat=20.0, silence=60.0, call=30.0)
#: Frames of an undisturbed exchange, see the first test.
UP, DOWN = 13, 10


def calls() -> list[Call]:
    """Two blobs of three frames; none; an empty one and one of two frames."""
    x: dict[str, Blob] = {"x": b"x" * 100, "y": b"y" * 64}
    z: dict[str, Blob] = {"none": b"", "z": bytes(range(128))}
    return [Call("forward", 1, 0, {"tokens": 5}, x), Call("step", 1), Call("backward", 2, 1, {}, z)]


def exchange(address: str) -> list[Answer]:
    """Join, three calls one after another, goodbye."""
    with client(address, limits=SMALL) as site:
        assert site.join().epoch == 7
        return [site.submit(call).result(20) for call in calls()]


@pytest.fixture(scope="module")
def expected() -> list[Answer]:
    with serving(Notes(), SMALL) as (_, address):
        return exchange(address)


SERVED = [("a", "forward", 1, 0), ("a", "step", 1, 0), ("a", "backward", 2, 1)]


def test_how_many_frames_an_exchange_has(expected: list[Answer]) -> None:
    notes = Notes()
    with serving(notes, SMALL) as (_, address), Cutter(address) as relay:
        assert exchange(relay.address) == expected
        assert relay.messages == {"up": UP, "down": DOWN}
        assert relay.connections == 1
    assert notes.calls == SERVED


WAYS: tuple[tuple[Literal["up", "down"], int], ...] = (("up", UP), ("down", DOWN))
CASES = [
    Cut(way, message, when)
    for way, count in WAYS
    for message in range(1, count + 1)
    for when in ("before", "within", "after")
]


@pytest.mark.parametrize("abort", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("cut", CASES, ids=lambda cut: "-".join(map(str, cut)))
def test_a_cut_changes_nothing(cut: Cut, abort: bool, expected: list[Answer]) -> None:
    notes = Notes()
    with serving(notes, SMALL) as (_, address), Cutter(address, cut, abort) as relay:
        assert exchange(relay.address) == expected
        assert relay.done.wait(5)
        assert len(notes.joins) == 1
        # whoever has all answers does not connect again only to say goodbye
        last = Cut("up", UP - 1, "before") if cut.way == "up" else Cut("down", DOWN - 1, "after")
        if cut.message < last.message:
            assert relay.connections == 2
    assert notes.calls == SERVED


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("message", [2, 4, 6, 9, 12])
def test_a_cut_with_calls_in_flight(way: Literal["up", "down"], message: int) -> None:
    notes, answers = Notes(), []
    cut = Cut(way, message, "after")
    with serving(notes, SMALL) as (_, address), Cutter(address, cut) as relay:
        with client(relay.address, limits=SMALL) as site:
            site.join()
            futures = [site.submit(call) for call in calls() * 4]
            answers = [future.result(20).meta for future in futures]
        assert relay.done.is_set()
    met: list[Any] = [{"site": "a", "step": c.step, "meta": dict(c.meta)} for c in calls() * 4]
    assert answers == met
    assert notes.calls == SERVED * 4


@pytest.mark.parametrize(("way", "message"), [("up", 3), ("up", 10), ("down", 4), ("down", 9)])
def test_a_byte_that_changes_on_the_way(
    way: Literal["up", "down"], message: int, expected: list[Answer]
) -> None:
    notes = Notes()
    with serving(notes, SMALL) as (server, address):
        with Cutter(address, Cut(way, message, "spoil")) as relay:
            assert exchange(relay.address) == expected
            assert relay.done.is_set()
            assert relay.connections == 2
        assert server.stats().refused == ({"FrameRefused": 1} if way == "up" else {})
    assert notes.calls == SERVED


@pytest.mark.parametrize("way", ["up", "down"])
def test_a_line_that_changes_every_byte_is_given_up(way: Literal["up", "down"]) -> None:
    cut = Cut(way, 3, "spoil")
    with serving(Notes(), SMALL) as (_, address), Cutter(address, cut, every=True) as relay:
        with client(relay.address, limits=SMALL, deadline=1.0) as site:
            site.join()
            with pytest.raises(DeadlineExceeded, match="changed on the way"):
                site.submit(calls()[0]).result(10)
        assert relay.connections > 2
