"""Sites over a run: one name at two nodes, returns, rests, quarantine."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from flower_geo.errors import ConfigError
from flower_geo.messages import NOTICE, Reply, Request
from flower_geo.resilience.membership import MAX_QUARANTINE, QUARANTINE, QUARANTINE_AFTER
from flower_geo.resilience.reception import TAKEOVER_AFTER
from tests.resilience.scripted import (
    FakeSite,
    World,
    error_reply,
    failing,
    honest,
    silent,
    sites,
)

# -- one name, two nodes ----------------------------------------------------------


def doubled(world: World, name: str = "b", node: int = 9, seconds: float = 1.0) -> FakeSite:
    """A second SuperNode with a site's name connects; the first stays."""
    world.sites[node] = FakeSite(name, node, seconds)
    world.grid.node_ids.append(node)
    return world.sites[node]


def dead(world: World, node: int) -> None:
    """The SuperNode is gone, but Flower has not missed it yet."""
    world.sites[node].behave = lambda site, request, kind: None


def trained(site: FakeSite) -> list[int]:
    return [round for kind, round in site.asked if kind == "train"]


def test_a_second_one_is_told_so_and_not_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path, *sites(1, 1))
    world.assemble()
    second = doubled(world)
    for round in (1, 2, 3):
        assert world.gather(round) == ["a", "b"]
        world.commit(round)
    assert trained(world.sites[2]) == [1, 2, 3] and trained(second) == []
    assert world.membership.sites["b"].node_id == 2
    (fault,) = world.seen("fault", what="started twice")
    assert fault["site"] == "b" and "node 2 answers" in fault["detail"]
    assert "\n" not in fault["detail"] and "site b was started twice" in caplog.text
    # And the node itself reads why, in the message it got.
    assert [message for node, message in world.told if node == 9] == [fault["detail"]]
    assert world.membership.turned_away == {}  # no reason to end a run under strict-start


def test_a_second_one_at_the_start(tmp_path: Path) -> None:
    world = World(tmp_path, FakeSite("a", 1), FakeSite("a", 2), FakeSite("b", 3))
    assert world.assemble() == ["a", "b"]
    assert world.gather(1) == ["a", "b"] and len(world.seen("fault", what="started twice")) == 1
    assert sorted(map(len, map(trained, (world.sites[1], world.sites[2])))) == [0, 1]


def test_when_the_first_leaves_the_second_takes_its_place(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1))
    world.assemble()
    second = doubled(world)
    world.gather(1)
    world.commit(1)
    world.grid.node_ids.remove(2)
    world.gather(2)
    world.commit(2)
    assert world.gather(3) == ["a", "b"] and trained(second)[-1] == 3


def test_a_restarted_one_takes_over_when_flower_misses_the_old_node(tmp_path: Path) -> None:
    """Killed in the middle of a round, back within seconds: it answers the same round."""
    world = World(tmp_path, *sites(1, 60), deadline=300.0)
    world.assemble()

    def killed(site: FakeSite, request: Request, kind: str) -> Any:
        if kind == "train":
            doubled(world)
        return None

    world.sites[2].behave = killed
    serve = world.grid.serve

    def missed_after(message: Any) -> Any:
        answers = list(serve(message))
        if message.metadata.dst_node_id == 2 and not answers:
            return [(42.0, error_reply(message, 5, "node unavailable", 1))]
        return answers

    world.grid.serve = missed_after
    assert world.gather(1) == ["a", "b"]
    assert 42 <= world.clock() <= 55 and trained(world.sites[9]) == [1]
    assert world.seen("fault", what="new node", site="b") and not world.seen("fault", what="twice")
    assert world.membership.sites["b"].answered == 1


def test_a_restarted_one_takes_over_from_a_node_that_keeps_silent_without_work(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, *sites(60, 1), deadline=300.0)
    world.assemble()
    world.membership.sites["b"].rest_until = 1  # it has nothing to do in this round
    dead(world, 2)
    second = doubled(world)
    world.gather(1)
    (fault,) = world.seen("fault", what="new node")
    assert "node 9 takes over from node 2" in fault["detail"] and TAKEOVER_AFTER < 60
    world.commit(1)
    assert world.gather(2) == ["a", "b"] and trained(second) == [2]


def test_one_that_knows_its_forerunner_to_be_dead_is_asked_at_once(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1), deadline=300.0)
    world.assemble()

    def killed(site: FakeSite, request: Request, kind: str) -> Any:
        if kind == "train":
            dead(world, 2)
            second = doubled(world)
            second.behave = lambda site, request, kind: replace(
                cast(Reply, honest(site, request, kind)), follows="2"
            )
        return None

    world.sites[2].behave = killed
    assert world.gather(1) == ["a", "b"]
    # Its hello, its second and no more; Flower still holds the old node for alive.
    assert world.clock() <= 5 and 2 in world.grid.node_ids
    assert trained(world.sites[9]) == [1]
    assert world.seen("fault", what="new node", site="b") and not world.seen("fault", what="twice")


def test_somebody_who_names_another_node_waits_as_before(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 60), deadline=300.0)
    world.assemble()
    second = doubled(world)
    second.behave = lambda site, request, kind: replace(
        cast(Reply, honest(site, request, kind)), follows="1"
    )
    assert world.gather(1) == ["a", "b"]
    assert trained(second) == [] and world.seen("fault", what="started twice")


def test_a_node_at_work_is_not_taken_for_dead(tmp_path: Path) -> None:
    """It answers no greeting while it trains; its reply shows that it lives."""
    world = World(tmp_path, *sites(1, 200), deadline=300.0)
    world.assemble()

    def busy(site: FakeSite, request: Request, kind: str) -> Any:
        return None if kind == "query" else honest(site, request, kind)

    world.sites[2].behave = busy
    second = doubled(world)
    assert world.gather(1) == ["a", "b"]
    assert trained(second) == [] and world.membership.sites["b"].node_id == 2
    assert world.seen("fault", what="started twice")


def test_a_challenger_that_leaves_again_changes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 100), deadline=300.0)
    world.assemble()
    world.sites[2].behave = lambda site, request, kind: (
        None if kind == "query" else honest(site, request, kind)
    )
    doubled(world)
    sleep = world.engine.exchange.sleep

    def leaving(seconds: float) -> None:
        sleep(seconds)
        if world.clock() > 20 and 9 in world.grid.node_ids:
            world.grid.node_ids.remove(9)

    world.engine.exchange.sleep = leaving
    assert world.gather(1) == ["a", "b"]
    assert world.seen("fault", what="started twice") == [] == world.seen("fault", what="new node")


def test_the_word_of_refusal_is_an_error_where_it_is_read() -> None:
    told = Request("run", "uid", config={NOTICE: "site b was started twice\x1b[2J"})
    with pytest.raises(ConfigError, match=r"^site b was started twice \[2J$"):
        Request.from_records(told.to_records())


# -- coming and going -------------------------------------------------------------


def test_a_site_that_comes_back_within_the_round_is_asked_again(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(40, 1), deadline=300.0)
    world.sites[2].behave = failing
    world.assemble()
    sleep = world.engine.exchange.sleep

    def returning(seconds: float) -> None:
        sleep(seconds)
        if world.clock() > 10 and 2 in world.grid.node_ids:
            world.grid.node_ids.remove(2)
        if world.clock() > 20 and 9 not in world.sites:
            doubled(world)

    world.engine.exchange.sleep = returning
    assert world.gather(1) == ["a", "b"] and trained(world.sites[9]) == [1]


def test_a_site_busy_for_an_earlier_life_is_asked_again_within_the_round(tmp_path: Path) -> None:
    def locked(site: FakeSite, request: Request, kind: str) -> Any:
        if kind == "train" and len(site.asked) < 4:
            return Reply(status="refused", site=site.name, detail="in use", error="StateLocked")
        return honest(site, request, kind)

    world = World(tmp_path, *sites(1, 1))
    world.sites[2].behave = locked
    world.assemble()
    assert world.gather(1) == ["a", "b"] and world.clock() < 30
    assert world.membership.sites["b"].failed == 0 and len(world.seen("fault", what="busy")) == 1


# -- rest -------------------------------------------------------------------------


def test_a_site_that_never_answers_costs_ever_fewer_deadlines(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1), deadline=100.0)
    world.sites[2].behave = silent
    world.assemble()
    cost = []
    for round in range(1, 22):
        began = world.clock()
        world.gather(round)
        world.commit(round)
        cost.append(world.clock() - began > 50)
    asked = [round for round, waited in enumerate(cost, start=1) if waited]
    assert asked == [1, 2, 4, 7, 12, 21] == trained(world.sites[2])
    world.sites[2].behave = honest
    world.membership.sites["b"].rest_until = 0
    assert world.gather(22) == ["a", "b"]
    world.commit(22)
    assert world.gather(23) == ["a", "b"]
    assert world.membership.sites["b"].failures_in_a_row == 0


def test_being_outrun_by_the_quorum_is_no_failure(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1, 50), quorum=2, deadline=100.0)
    world.assemble()
    for round in range(1, 6):
        world.gather(round)
        world.commit(round)
        world.clock.now += 60
    record = world.membership.sites["c"]
    assert record.failures_in_a_row == 0 and trained(world.sites[3]) == [1, 2, 3, 4, 5]


# -- quarantine -------------------------------------------------------------------


def hostile(site: FakeSite, request: Request, kind: str) -> Any:
    done = honest(site, request, kind)
    return replace(done, arrays=None) if kind == "train" else done  # type: ignore[type-var]


def test_quarantine_and_the_way_back(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1))
    world.sites[2].behave = hostile
    world.assemble()
    refused: list[int] = []
    for round in range(1, 150):
        if len(refused) == QUARANTINE_AFTER + 2:
            world.sites[2].behave = honest
        world.gather(round)
        world.commit(round)
        if world.seen("site", site="b", round=round, status="refused"):
            refused.append(round)
        if world.seen("site", site="b", round=round, status="accepted"):
            break
    gaps = [after - before - 1 for before, after in itertools.pairwise(refused)]
    assert gaps == [0, 1, QUARANTINE, 2 * QUARANTINE]
    assert round - refused[-1] - 1 == 4 * QUARANTINE == MAX_QUARANTINE
    assert len(world.seen("fault", what="quarantined", site="b")) == 3
    assert world.gather(round + 1) == ["a", "b"]
    record = world.membership.sites["b"]
    assert (record.refusals_in_a_row, record.refused) == (0, 5)


def test_a_site_in_quarantine_is_not_woken_to_make_up_numbers(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1), min_sites=2)
    world.sites[2].behave = hostile
    world.assemble()
    for attempt in range(1, QUARANTINE_AFTER + 1):
        world.gather(1, attempt)
    asked = len(world.sites[2].asked)
    world.gather(1, QUARANTINE_AFTER + 1)
    assert len(world.sites[2].asked) == asked and world.membership.in_quarantine(1) == ["b"]
