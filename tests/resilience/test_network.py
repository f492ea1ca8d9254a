"""A SuperLink that is away: waited for, told of, and given up in one line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from flwr.supercore.inflatable.inflatable_object import UnexpectedObjectContentError
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, ObjectPushError

from flower_geo.errors import StateError, SuperLinkLost
from flower_geo.resilience.network import Backoff, StallWatch, is_trouble
from tests.resilience.scripted import World, sites

REQUEST = httpx.Request("POST", "http://superlink/v1")
TROUBLES: list[Exception] = [
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("too slow"),
    httpx.HTTPStatusError("500", request=REQUEST, response=httpx.Response(500, request=REQUEST)),
    ObjectPushError("object", 1, "session"),
    ObjectPullError("object", "timeout"),
    ConnectionResetError("peer"),
    TimeoutError("slow"),
    grpc.RpcError("unavailable"),
]


@pytest.mark.parametrize("error", TROUBLES, ids=lambda error: type(error).__name__)
def test_what_is_trouble_on_the_way(error: Exception) -> None:
    assert is_trouble(error)


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("x"), StateError("x"), RuntimeError()])
def test_what_is_not(error: Exception) -> None:
    assert not is_trouble(error)


def away(world: World, begin: float, end: float, error: Exception = TROUBLES[2]) -> list[str]:
    """The SuperLink fails every call between two times; the calls made then are returned."""
    tried: list[str] = []

    def failing(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            if begin <= world.clock() < end:
                tried.append(name)
                raise error
            return call(*args)

        return wrapped

    for name in ("get_node_ids", "push_messages", "pull_messages"):
        setattr(world.grid, name, failing(name, getattr(world.grid, name)))
    return tried


@pytest.mark.parametrize("error", TROUBLES, ids=lambda error: type(error).__name__)
def test_an_outage_within_a_round_is_waited_out(tmp_path: Path, error: Exception) -> None:
    world = World(tmp_path, *sites(5, 40), deadline=300.0)
    world.assemble()
    tried = away(world, 3, 120, error)
    assert world.gather(1) == ["a", "b"]
    assert 120 <= world.clock() <= 145  # no pause is longer than 20 s
    assert 0 < len(tried) < 25  # and no pause is short for long
    told = [fault["detail"] for fault in world.seen("fault", what="network")]
    assert len(told) == 2 and type(error).__name__ in told[0] and "answers again" in told[1]
    assert world.membership.sites["b"].failed == 0


@pytest.mark.parametrize("name", ["get_node_ids", "push_messages"])
def test_an_outage_when_a_round_begins(tmp_path: Path, name: str) -> None:
    world = World(tmp_path, *sites(1, 1), deadline=300.0)
    world.assemble()
    call = getattr(world.grid, name)

    def failing(*args: Any) -> Any:
        if world.clock() < 30:
            raise TROUBLES[0]
        return call(*args)

    setattr(world.grid, name, failing)
    assert world.gather(1) == ["a", "b"] and 30 <= world.clock() < 60
    assert [s.asked.count(("train", 1)) for s in world.sites.values()] == [1, 1]


def test_an_outage_longer_than_the_deadline_ends_the_round_with_what_there_is(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, *sites(1, 40), deadline=60.0)
    world.assemble()
    away(world, 3, 1e9)
    assert world.gather(1) == ["a"]
    assert world.clock() == pytest.approx(60.0, abs=1)


def test_a_superlink_that_stays_away_ends_the_run_in_one_line(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1), deadline=60.0)
    world.assemble()
    away(world, 0, 1e9)
    with pytest.raises(SuperLinkLost, match=r"could not be reached for 60 s .*HTTPStatusError"):
        world.gather(1)
    assert world.clock() <= 61


def test_errors_of_our_own_are_not_taken_for_an_outage(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1))
    world.assemble()
    away(world, 0, 1e9, RuntimeError("a mistake"))
    with pytest.raises(RuntimeError, match="a mistake"):
        world.gather(1)


def test_a_reply_that_flower_cannot_put_together_costs_itself(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 2, 1))
    world.assemble()
    pull = world.grid.pull_messages

    def spoilt(ids: Any) -> Any:
        found = pull(ids)
        if any(message.metadata.src_node_id == 2 for message in found):
            raise UnexpectedObjectContentError("chunk", "no such tensor")
        return found

    world.grid.pull_messages = spoilt  # type: ignore[method-assign,assignment]
    assert world.gather(1) == ["a", "c"] and world.clock() < 5
    (line,) = world.seen("site", status="failed")
    assert line["site"] == "b" and "its reply cannot be read" in line["reason"]


def test_pauses_grow_are_jittered_and_bounded() -> None:
    low, high = Backoff(1.0, 8.0, lambda: 0.0), Backoff(1.0, 8.0, lambda: 1.0)
    assert [low.next() for _ in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert [high.next() for _ in range(5)] == [1.0, 2.0, 4.0, 8.0, 8.0]
    low.reset()
    assert low.next() == 0.5
    assert len({Backoff().next() for _ in range(8)}) > 1
    forever = Backoff()
    forever.tries = 10**6
    assert forever.next() <= 20


def test_a_call_that_does_not_come_back_is_told_of_once() -> None:
    told: list[str] = []
    heard = threading.Event()

    def tell(line: str) -> None:
        told.append(line)
        heard.set()

    watch = StallWatch(0.05, tell)
    watch.start()
    try:
        with watch.calling("pull"):
            assert heard.wait(5)
            time.sleep(0.2)
        assert told == ["the SuperLink has not answered a pull for 0.05 s"]
        for _ in range(20):
            with watch.calling("push"):
                time.sleep(0.001)
        assert len(told) == 1
    finally:
        watch.stop()
        watch.stop()
    assert not any(t.name == "flower-geo-stall" for t in threading.enumerate())


def test_the_exchange_tells_the_watch_of_every_call(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1))
    seen: list[str] = []

    class Noting(StallWatch):
        def calling(self, what: str) -> Any:
            seen.append(what)
            return super().calling(what)

    world.engine.exchange.watch = Noting(60, seen.append)
    world.assemble()
    world.gather(1)
    assert set(seen) == {"look at the nodes", "push", "pull"}
