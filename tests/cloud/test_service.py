"""The service behind the real stream: sites join, step, come back, end, and evaluate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from flower_geo.calls import Answer, Call
from flower_geo.cloud.group import Group
from flower_geo.cloud.service import Service
from flower_geo.cloud.store import HalfStore
from flower_geo.errors import CallFailed, DeadlineExceeded, SessionLost
from flower_geo.transport import Joined, SplitClient
from tests.cloud.counting import Counting
from tests.transport.world import hello, serving


class World:
    """A service with a server, a group of two sites and clients.

    Attributes:
        failed: what the service said it failed of.
    """

    def __init__(self, folder: Path) -> None:
        self.failed: list[Exception] = []
        self.service = Service(lambda *sites: self.server.drop(*sites), self.failed.append)
        self.engine = Counting()
        self.engine.begin(["a", "b"])
        self.group = Group(["a", "b"], self.engine, HalfStore(folder, "one"), 2, 20.0)
        self._serving = serving(self.service)
        self.server, self.address = self._serving.__enter__()
        self.service.begin(1, [self.group], self.engine)
        self.clients: list[SplitClient] = []
        self.pool = ThreadPoolExecutor(8)

    def client(self, site: str, deadline: float = 15.0, **changes: Any) -> SplitClient:
        client = SplitClient(self.address, hello(site, **changes), deadline=deadline)
        self.clients.append(client)
        return client

    def joined(self, *clients: SplitClient, steps: tuple[int, ...] = (0,)) -> list[Joined]:
        """All at once: each waits for the others."""
        return list(self.pool.map(lambda client: client.join(steps), clients))

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.service.stop()
        self._serving.__exit__(None, None, None)
        self.pool.shutdown()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def answered(client: SplitClient, kind: str, step: int = 0) -> Answer:
    return client.submit(Call(kind, step)).result(10)


def test_a_round_from_begin_to_end(world: World) -> None:
    a, b = world.client("a"), world.client("b")
    assert world.joined(a, b) == [Joined(1, 0)] * 2
    for step in (1, 2, 3):
        for client in (a, b):
            assert "tally" in answered(client, "step", step).meta
    ends = [client.submit(Call("finish", 0)) for client in (a, b)]
    assert [end.result(10).meta for end in ends] == [{"saved": True}] * 2
    assert world.group.over and world.service.settled() == [world.group]
    # A process that was started again may be told of the round in a moment.
    with pytest.raises(DeadlineExceeded, match="is not asked for round 1"):
        world.client("a", 0.5).join()


def test_a_site_that_comes_back_drops_the_others_who_join_anew(world: World) -> None:
    a, b = world.client("a"), world.client("b")
    world.joined(a, b)
    for step in (1, 2, 3):
        for client in (a, b):
            answered(client, "step", step)
    undisturbed = world.engine.tally
    again = world.client("b")
    coming = world.pool.submit(again.join, (2,))
    with pytest.raises(SessionLost):
        while True:
            answered(a, "step", 4)
    assert a.join((2,)) == Joined(2, 2) == coming.result(10)
    for client in (a, again):
        answered(client, "step", 3)
    assert world.engine.tally == undisturbed


def test_who_comes_to_evaluate_takes_no_part(world: World) -> None:
    visitor = world.client("c", attempt=0)
    assert visitor.join() == Joined(0, 0)
    assert "tally" in answered(visitor, "evaluate").meta
    with pytest.raises(CallFailed, match="cannot call 'step'"):
        answered(visitor, "step", 1)
    assert world.engine.ran == []


def test_who_is_not_asked_is_turned_away(world: World) -> None:
    with pytest.raises(DeadlineExceeded, match="site c is not asked for round 1"):
        world.client("c", 0.5).join()
    with pytest.raises(DeadlineExceeded, match="site a is not asked for round 2"):
        world.client("a", 0.5, round=2).join()


def test_a_new_round_ends_what_was_parked(world: World, tmp_path: Path) -> None:
    a, b = world.client("a"), world.client("b")
    world.joined(a, b)
    parked = a.submit(Call("finish", 0))
    engine = Counting()
    engine.begin(["a"])
    group = Group(["a"], engine, HalfStore(tmp_path, "two"), 2, 20.0)
    while not world.group._ending:
        pass
    world.service.begin(2, [group], engine)
    with pytest.raises(SessionLost, match="another round begins"):
        parked.result(10)
    assert world.client("a", round=2).join() == Joined(1, 0)


def test_a_compute_thread_that_fails_says_so(world: World) -> None:
    a, b = world.client("a"), world.client("b")
    world.joined(a, b)
    said = threading.Event()
    world.engine.work = lambda timeout: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    for _ in range(200):
        if world.failed:
            break
        said.wait(0.05)
    assert isinstance(world.failed[0], ZeroDivisionError)
