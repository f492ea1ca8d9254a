"""Open requests: replies in any order, errors by the message they answer, deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from flwr.app import Error, Message, RecordDict

from flower_geo.resilience.exchange import Exchange, Open
from tests.resilience.scripted import Clock, FakeGrid, error_reply, plain_records


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def grid(clock: Clock) -> FakeGrid:
    return FakeGrid(clock)


@pytest.fixture
def exchange(grid: FakeGrid, clock: Clock) -> Exchange:
    return Exchange(grid, 0.5, clock, clock.sleep)


def answer(message: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


def wait_until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.005)


def anything(request: Open) -> bool:
    return True


def test_replies_come_as_they_arrive_whatever_the_order(exchange: Exchange, grid: FakeGrid) -> None:
    delays = {1: 9.0, 2: 3.0, 3: 6.0, 4: 0.0}
    grid.serve = lambda m: [(delays[m.metadata.dst_node_id], answer(m))]
    for node in delays:
        assert exchange.push(node, f"s{node}", 5, "train", plain_records())
    seen = [(i.request.site, exchange.clock()) for i in exchange.take(100.0, anything)]
    assert [site for site, _ in seen] == ["s4", "s2", "s3", "s1"]
    assert all(at - delays[int(site[1])] <= 0.5 for site, at in seen)
    assert exchange.open == {}


def test_a_request_says_who_was_asked_for_what(exchange: Exchange, grid: FakeGrid) -> None:
    exchange.clock.now = 4.0  # type: ignore[attr-defined]
    exchange.push(7, "s", 3, "train", plain_records())
    assert list(exchange.open.values()) == [Open(7, "s", 3, "train", 4.0)]
    pushed = grid.pushed[0].metadata
    assert (pushed.dst_node_id, pushed.message_type, pushed.group_id) == (7, "train", "3")


def test_the_deadline_ends_the_wait_and_the_request_stays_open(
    exchange: Exchange, grid: FakeGrid
) -> None:
    grid.serve = lambda m: [(50.0, answer(m))]
    exchange.push(1, "s", 1, "train", plain_records())
    assert list(exchange.take(10.0, anything)) == []
    assert exchange.clock() == pytest.approx(10.0) and len(exchange.open) == 1
    late = list(exchange.take(100.0, anything))
    assert [i.request.round for i in late] == [1] and exchange.clock() < 51


def test_what_is_there_at_the_deadline_still_counts(exchange: Exchange, grid: FakeGrid) -> None:
    grid.serve = lambda m: [(0.0, answer(m))]
    exchange.push(1, "s", 1, "train", plain_records())
    assert len(list(exchange.take(exchange.clock() - 1, anything))) == 1


def test_unwanted_requests_are_answered_but_not_waited_for(
    exchange: Exchange, grid: FakeGrid
) -> None:
    delays = {1: 1.0, 2: 0.5, 3: 80.0}
    grid.serve = lambda m: [(delays[m.metadata.dst_node_id], answer(m))]
    exchange.push(1, "a", 2, "train", plain_records())
    exchange.push(2, "b", 1, "train", plain_records())
    exchange.push(3, "c", 1, "train", plain_records())
    got = [i.request.site for i in exchange.take(100.0, lambda r: r.round == 2)]
    assert got == ["b", "a"] and exchange.clock() == 1.0


def test_errors_are_matched_by_the_message_they_answer(exchange: Exchange, grid: FakeGrid) -> None:
    def lost(message: Message) -> Any:
        node = message.metadata.dst_node_id
        return [(1.0, error_reply(message, 5, "Node\nunavailable\x1b[2J", 1) if node == 2 else
                 answer(message))]  # fmt: skip

    grid.serve = lost
    exchange.push(1, "here", 1, "train", plain_records())
    exchange.push(2, "gone", 1, "train", plain_records())
    got = {i.request.site: i for i in exchange.take(10.0, anything)}
    assert got["here"].records is not None and got["here"].failure == ""
    assert got["gone"].records is None
    assert got["gone"].failure == "Flower error 5: Node unavailable [2J"


def test_an_error_without_reason(exchange: Exchange, grid: FakeGrid) -> None:
    grid.serve = lambda m: [(0.0, Message(Error(8), reply_to=m))]
    exchange.push(1, "s", 1, "train", plain_records())
    (got,) = exchange.take(1.0, anything)
    assert got.failure == "Flower error 8: no reason given"


def test_one_reply_is_in_memory_at_a_time(exchange: Exchange, grid: FakeGrid) -> None:
    grid.serve = lambda m: [(0.0, answer(m))]
    for node in range(5):
        exchange.push(node, f"s{node}", 1, "train", plain_records())
    pulled = 0
    pull = grid.pull_messages

    def counting(ids: Any) -> Any:
        nonlocal pulled
        found = pull(ids)
        pulled += len(found)
        return found

    grid.pull_messages = counting  # type: ignore[method-assign,assignment]
    for number, _ in enumerate(exchange.take(10.0, anything), start=1):
        assert pulled == number


def test_duplicates_and_strangers_are_ignored(exchange: Exchange, grid: FakeGrid) -> None:
    strangers: list[Message] = []

    def twice(message: Message) -> Any:
        stranger = answer(message)
        stranger.metadata.__dict__["_reply_to_message_id"] = "somebody-else"
        strangers.append(stranger)
        return [(0.0, answer(message)), (0.0, answer(message)), (0.0, stranger)]

    grid.serve = twice
    exchange.push(1, "s", 1, "train", plain_records())
    assert len(list(exchange.take(5.0, anything))) == 1


@pytest.mark.parametrize("given", [[], [None], [""]])
def test_a_push_the_superlink_does_not_take(
    exchange: Exchange, grid: FakeGrid, given: list[Any]
) -> None:
    grid.refused[3] = given
    assert not exchange.push(3, "s", 1, "train", plain_records())
    assert exchange.open == {}
    assert list(exchange.take(5.0, anything)) == [] and exchange.clock() == 0.0


def test_dropped_requests_are_not_looked_for(exchange: Exchange, grid: FakeGrid) -> None:
    grid.serve = lambda m: [(0.0, answer(m))]
    for round in (1, 2, 3):
        exchange.push(round, "s", round, "train", plain_records())
    got = []
    for incoming in exchange.take(5.0, anything):
        got.append(incoming.request.round)
        exchange.drop(lambda request: request.round == 2)
    assert got == [1, 3]


def test_an_empty_reply_is_a_failure(exchange: Exchange, grid: FakeGrid) -> None:
    def empty(message: Message) -> Any:
        reply = answer(message)
        reply.__dict__["_content"] = None
        return [(0.0, reply)]

    grid.serve = empty
    exchange.push(1, "s", 1, "train", plain_records())
    (got,) = exchange.take(1.0, anything)
    assert got.records is None and got.failure == "the reply is empty"


# -- replies that are announced before they are whole ------------------------------


class Uploading(FakeGrid):
    """A grid where the pull of some nodes' replies waits for their upload."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.uploads: dict[str, threading.Event] = {}
        self.ends: dict[str, Exception] = {}

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ids = list(message_ids)
        if (uploaded := self.uploads.get(ids[0])) is not None:
            assert uploaded.wait(20)
            if ids[0] in self.ends:
                raise self.ends[ids[0]]
        return super().pull_messages(ids)


@pytest.fixture
def slow(clock: Clock) -> Iterator[tuple[Uploading, Exchange]]:
    grid = Uploading(clock)
    grid.serve = lambda m: [(0.0, answer(m))]
    exchange = Exchange(grid, 0.5, clock, clock.sleep)
    exchange.pulls.patience = 0.05
    yield grid, exchange
    for uploaded in grid.uploads.values():
        uploaded.set()
    exchange.close()


def uploads(grid: Uploading, exchange: Exchange, *sites: str) -> list[str]:
    """Requests to sites, of whose replies none is uploaded yet."""
    before = set(exchange.open)
    for node, site in enumerate(sites, 50):
        assert exchange.push(node, site, 1, "train", plain_records())
    keys = [key for key in exchange.open if key not in before]
    grid.uploads |= {key: threading.Event() for key in keys}
    return keys


def test_a_long_upload_keeps_nobody_from_the_others_nor_from_the_end(
    slow: tuple[Uploading, Exchange],
) -> None:
    grid, exchange = slow
    (key,) = uploads(grid, exchange, "slow")
    exchange.push(2, "fast", 1, "train", plain_records())
    assert [i.request.site for i in exchange.take(10.0, anything)] == ["fast"]
    assert exchange.clock() == pytest.approx(10.0) and list(exchange.open) == [key]
    assert exchange.pulls.asked(key) and exchange.pulls.busy == 1
    grid.uploads[key].set()
    wait_until(lambda: not exchange.pulls.busy)
    assert [i.request.site for i in exchange.take(20.0, anything)] == ["slow"]
    assert not exchange.open and not exchange.pulls.asked(key)


def test_only_so_many_replies_are_under_way_at_once(slow: tuple[Uploading, Exchange]) -> None:
    grid, exchange = slow
    exchange.pulls.most = 2
    keys = uploads(grid, exchange, "a", "b", "c")
    assert list(exchange.take(5.0, anything)) == [] and exchange.pulls.busy == 2
    grid.uploads[keys[0]].set()
    wait_until(lambda: exchange.pulls.busy == 1)
    assert [i.request.site for i in exchange.take(10.0, anything)] == ["a"]
    assert exchange.pulls.busy == 2 and exchange.pulls.asked(keys[2])


def test_an_upload_that_breaks_off_costs_that_reply(slow: tuple[Uploading, Exchange]) -> None:
    grid, exchange = slow
    bad, lost = uploads(grid, exchange, "bad", "lost")
    grid.ends = {bad: ValueError("half a tensor"), lost: ConnectionError("no route")}
    assert list(exchange.take(5.0, anything)) == []
    for uploaded in grid.uploads.values():
        uploaded.set()
    wait_until(lambda: not exchange.pulls.busy)
    (found,) = exchange.take(6.0, anything)
    assert found.request.site == "bad" and "half a tensor" in found.failure
    # The network's fault: asked again.
    assert list(exchange.open) == [lost]
    grid.ends.clear()
    assert [i.request.site for i in exchange.take(60.0, anything)] == ["lost"]


def test_a_request_dropped_meanwhile_is_answered_to_nobody(
    slow: tuple[Uploading, Exchange],
) -> None:
    grid, exchange = slow
    (key,) = uploads(grid, exchange, "slow")
    assert list(exchange.take(5.0, anything)) == []
    exchange.drop(anything)
    grid.uploads[key].set()
    wait_until(lambda: not exchange.pulls.busy)
    assert list(exchange.take(10.0, anything)) == [] and not exchange.pulls.full
