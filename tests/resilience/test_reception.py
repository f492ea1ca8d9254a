"""Greetings: who is let in, who is asked again, and how long a run waits to begin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_geo.errors import NotEnoughSites
from flower_geo.messages import Reply, Request
from tests.resilience.scripted import FakeSite, World, honest, sites


def test_a_site_that_comes_mid_run_is_asked_from_the_next_round_on(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1))
    world.assemble()
    world.sites[2] = FakeSite("b", 2)
    world.grid.node_ids = [1, 2]
    assert world.gather(1) == ["a"]
    world.commit(1)
    assert world.gather(2) == ["a", "b"]
    assert world.sites[2].asked == [("query", 0), ("train", 2)]


def test_waiting_for_nodes_does_not_hammer_the_superlink(tmp_path: Path) -> None:
    world = World(tmp_path)
    looks = 0
    nodes = world.grid.get_node_ids

    def counted() -> list[int]:
        nonlocal looks
        looks += 1
        return nodes()

    world.grid.get_node_ids = counted  # type: ignore[method-assign]
    with pytest.raises(NotEnoughSites, match="0 of min-sites=1 sites are ready after 10 s"):
        world.assemble()
    assert looks < 60 and world.clock() == pytest.approx(10.0, abs=2)


def test_nodes_that_connect_while_a_run_begins(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1), min_sites=2)
    world.grid.node_ids = [2]
    sleep = world.engine.exchange.sleep

    def later(seconds: float) -> None:
        sleep(seconds)
        if world.clock() > 5:
            world.grid.node_ids = [1, 2]

    world.engine.exchange.sleep = later
    assert world.assemble() == ["a", "b"] and 5 < world.clock() < 8


def refusing(site: FakeSite, request: Request, kind: str) -> Any:
    return Reply(status="refused", site=site.name, detail="no text at /data", error="DataError")


def test_strict_start_ends_a_run_that_has_not_begun(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1))
    world.sites[2].behave = refusing
    with pytest.raises(NotEnoughSites, match="site b: no text at /data"):
        world.assemble()


@pytest.mark.parametrize(("strict", "committed"), [(False, False), (True, True)])
def test_else_a_bad_site_costs_itself(tmp_path: Path, strict: bool, committed: bool) -> None:
    world = World(tmp_path, *sites(1, 1), strict_start=strict)
    world.sites[2].behave = refusing
    assert world.assemble(committed) == ["a"]
    assert world.gather(1) == ["a"] and ("train", 1) not in world.sites[2].asked
    assert world.seen("fault", what="turned away")


def test_too_few_says_why(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1), strict_start=False, min_sites=2)
    world.sites[2].behave = refusing
    with pytest.raises(NotEnoughSites, match=r"1 of min-sites=2 .*no text at /data"):
        world.assemble()


def test_a_site_busy_for_an_earlier_life_of_the_server_is_greeted_again(tmp_path: Path) -> None:
    def busy(site: FakeSite, request: Request, kind: str) -> Any:
        if kind == "query" and len(site.asked) < 4:
            detail = "the state of site 'a' is in use"
            return Reply(status="refused", site="a", detail=detail, error="StateLocked")
        return honest(site, request, kind)

    world = World(tmp_path, *sites(1))
    world.sites[1].behave = busy
    assert world.assemble() == ["a"]
    assert len(world.seen("fault", what="busy")) == 3


def test_a_greeting_nobody_answers_holds_up_no_run_for_ever(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1))
    world.sites[2].behave = lambda site, request, kind: None
    assert world.assemble() == ["a"]
    assert world.clock() == pytest.approx(110.0, abs=3)  # wait-for-sites and a deadline
