"""Late replies: folded with less weight, and never twice the same data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.aggregation import weighted_mean
from flower_geo.messages import Request
from tests.resilience.scripted import BASE, FakeSite, World, failing, honest, needing, sites


def late(tmp_path: Path, staleness: int, seconds: float = 12.0, **policy: Any) -> World:
    """A world after round 1, with b's reply to it still on the way."""
    options: dict[str, Any] = {"max_staleness": staleness, "deadline": 10.0} | policy
    world = World(tmp_path, *sites(1, seconds), **options)
    world.assemble()
    assert world.gather(1) == ["a"]
    world.commit(1)
    return world


def test_a_late_reply_is_folded_with_less_weight(tmp_path: Path) -> None:
    world = late(tmp_path, 1)
    world.sites[1].seconds = 5.0
    assert world.gather(2) == ["a", "b*"]
    by_site = {reply.meta.site: reply for reply in world.outcome.replies}
    assert (by_site["b"].meta.round, by_site["b"].weight) == (1, 50.0)
    assert world.sites[2].asked == [("query", 0), ("train", 1)]
    (line,) = world.seen("site", site="b", status="accepted")
    assert line["staleness"] == 1
    world.commit(2)
    assert world.membership.sites["b"].accepted == 1
    world.sites[2].seconds = 1
    assert world.gather(3) == ["a", "b"]


@pytest.mark.parametrize(("staleness", "folded"), [(0, False), (1, False), (2, True)])
def test_how_late_a_reply_may_be(tmp_path: Path, staleness: int, folded: bool) -> None:
    world = late(tmp_path, staleness, seconds=24.0, quorum=1)
    world.gather(2)
    world.commit(2)
    world.clock.now = 30.0
    world.sites[1].seconds = 5.0
    world.sites[2].seconds = 99.0
    world.engine.policy = replace(world.engine.policy, quorum_of=lambda n: n)
    assert ("b*" in world.gather(3)) == folded
    if not folded:
        assert world.seen("site", site="b", status="late")


def test_a_late_reply_does_not_stand_in_for_one_that_was_asked(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 12, 1), max_staleness=1, deadline=10.0)
    world.assemble()
    assert world.gather(1) == ["a", "c"]
    world.commit(1)
    world.sites[3].seconds = 8.0
    assert world.gather(2) == ["a", "b*", "c"]


def test_a_round_short_of_sites_waits_for_late_replies(tmp_path: Path) -> None:
    world = late(tmp_path, 1)
    world.grid.node_ids = [2]
    assert world.gather(2) == ["b*"] and world.clock() < 14


def test_a_site_still_at_this_very_round_is_waited_for_in_a_retry(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(12, 14), max_staleness=1, deadline=10.0)
    world.assemble()
    assert world.gather(1) == []
    assert world.gather(1, attempt=2) == ["a", "b"]
    assert world.sites[1].asked.count(("train", 1)) == 1 and world.outcome.asked == 2


def moved(world: World, node: int, seconds: float) -> None:
    """b comes back on another node; its old one's reply is still in the SuperLink."""
    world.sites[node] = FakeSite("b", node, seconds)
    world.grid.node_ids = [1, node]
    world.assemble()


def test_a_late_reply_is_dropped_while_a_newer_request_is_open(tmp_path: Path) -> None:
    world = late(tmp_path, 3)
    moved(world, 9, 6.0)
    assert world.gather(2) == ["a", "b"]
    assert [r.meta.round for r in world.outcome.replies] == [2, 2]
    assert world.seen("site", site="b", status="late")


def test_a_late_reply_never_replaces_a_newer_one_of_its_site(tmp_path: Path) -> None:
    world = late(tmp_path, 3, seconds=14.0)
    moved(world, 9, 1.0)
    world.sites[1].seconds = 6.0
    assert world.gather(2) == ["a", "b"]
    assert [r.meta.round for r in world.outcome.replies] == [2, 2]
    assert world.seen("site", site="b", status="late")


def test_data_folded_since_is_not_folded_again_from_a_late_reply(tmp_path: Path) -> None:
    world = late(tmp_path, 3, seconds=20.0)
    moved(world, 9, 1.0)
    assert world.gather(2) == ["a", "b"]
    world.commit(2)
    world.sites[1].seconds = 9.0
    world.sites[9].behave = failing
    assert world.gather(3) == ["a"]
    assert world.seen("site", site="b", status="late")
    world.commit(3)
    assert world.membership.sites["b"].accepted == 2


def test_a_late_reply_spooled_before_a_crash_is_dropped_when_newer_was_folded(
    tmp_path: Path,
) -> None:
    first = late(tmp_path, 1)
    first.sites[1].seconds = 5.0
    assert first.gather(2) == ["a", "b*"]
    for accepted, expected in ((0, ["a", "b*"]), (1, ["a", "b"])):
        second = World(tmp_path, *sites(1, 1), max_staleness=1)
        second.assemble()
        second.membership.sites["b"].accepted = accepted
        assert second.gather(2) == expected


def test_late_weights_become_differences_from_what_they_began_with(tmp_path: Path) -> None:
    def local(site: FakeSite, request: Request, kind: str) -> Any:
        done = honest(site, request, kind)
        return replace(done, kind="weights") if kind == "train" else done  # type: ignore[type-var]

    world = World(tmp_path, *sites(1, 12), max_staleness=1, deadline=10.0)
    world.sites[2].behave = local
    world.assemble()
    world.gather(1)
    world.commit(1)
    world.sites[1].seconds = 5.0
    assert world.gather(2) == ["a", "b*"]
    reply = world.outcome.replies[1]
    mean = dict(weighted_mean(BASE, [reply]))
    assert reply.kind == "delta" and torch.equal(mean["w"], torch.ones(3, 4))


def test_needs_and_failures_of_an_earlier_round_are_no_fault_of_this_one(tmp_path: Path) -> None:
    world = late(tmp_path, 0)
    world.sites[2].behave = needing(1)
    world.sites[2].seconds = 12.0
    world.gather(2)
    world.commit(2)
    world.sites[2].seconds = world.sites[1].seconds = 5.0
    assert world.gather(3) == ["a"]  # two deadlines missed: b rests a round
    world.commit(3)
    assert world.gather(4) == ["a", "b"]
    assert world.membership.sites["b"].failed == 0
