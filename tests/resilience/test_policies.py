"""Round policies: whom a round asks, how long it waits for stragglers, what late replies weigh."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flower_geo.config import DiLoCoConfig
from flower_geo.messages import Request
from flower_geo.resilience import RoundPolicy
from tests.resilience.scripted import FakeSite, World, failing, honest, silent, sites


def trained(world: World, round: int) -> list[str]:
    return sorted(s.name for s in world.sites.values() if ("train", round) in s.asked)


# -- grace ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grace", "expected", "ends"),
    [(0.0, ["a", "b"], 2), (4.0, ["a", "b", "c"], 6), (9.0, ["a", "b", "c", "d"], 10),
     (500.0, ["a", "b", "c", "d"], 10)],
)  # fmt: skip
def test_stragglers_have_a_grace_after_the_quorum(
    tmp_path: Path, grace: float, expected: list[str], ends: float
) -> None:
    world = World(tmp_path, *sites(1, 2, 5, 10), quorum=2, grace=grace)
    world.assemble()
    assert world.gather(1) == expected
    assert world.clock() == pytest.approx(ends, abs=1.0)


def test_grace_never_outlasts_the_deadline(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 2, 500), quorum=2, grace=300.0, deadline=20.0)
    world.assemble()
    assert world.gather(1) == ["a", "b"] and world.clock() == pytest.approx(20.0)
    # It was the grace that ended: the straggler did not cost the others a quorum.
    assert world.membership.sites["c"].failures_in_a_row == 0


def test_no_grace_before_the_quorum(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 50), quorum=2, grace=5.0)
    world.assemble()
    assert world.gather(1) == ["a", "b"] and 50 <= world.clock() < 52


# -- sites a round ----------------------------------------------------------------


def of(text: str) -> Callable[[int], int]:
    return DiLoCoConfig(sites_per_round=text).sites_of


@pytest.mark.parametrize(
    ("amount", "over", "needed", "asked"),
    [("all", 0.0, 8, 8), ("all", 0.5, 8, 8), ("3", 0.0, 3, 3), ("0.5", 0.0, 4, 4),
     ("0.5", 0.25, 4, 5), ("3", 0.1, 3, 4), ("0.1", 0.0, 2, 2), ("99", 1.0, 8, 8),
     ("5", 0.2, 5, 6)],
)  # fmt: skip
def test_how_many_are_asked(amount: str, over: float, needed: int, asked: int) -> None:
    policy = RoundPolicy(lambda n: n, sites_of=of(amount), over_provision=over, min_sites=2)
    assert (policy.needed(8), policy.to_ask(8)) == (needed, asked)
    assert policy.to_ask(1) == 1 and policy.needed(0) == 0


def test_a_round_asks_so_many_and_everybody_has_a_turn(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(*[1] * 7), sites_of=lambda n: 3, seed=5)
    world.assemble()
    turns: Counter[str] = Counter()
    for round in range(1, 15):
        got = world.gather(round)
        assert len(got) == 3 and got == sorted(got) == trained(world, round)
        turns.update(got)
        world.commit(round)
    assert sum(turns.values()) == 3 * 14 and set(turns.values()) <= {5, 6, 7}
    for site in world.sites.values():
        asked = [0, *(round for kind, round in site.asked if kind == "train")]
        assert max(b - a for a, b in itertools.pairwise(asked)) <= 3  # 7 sites in threes


def test_the_draw_depends_on_seed_and_round_and_not_on_anything_else(tmp_path: Path) -> None:
    def drawn(seed: int, folder: str, shuffle: int) -> list[list[str]]:
        world = World(tmp_path / folder, *sites(*[1] * 6), sites_of=lambda n: 2, seed=seed)
        random.Random(shuffle).shuffle(world.grid.node_ids)
        world.assemble()
        got = []
        for round in range(1, 5):
            got.append(world.gather(round))
            world.commit(round)
        return got

    assert drawn(0, "a", 1) == drawn(0, "b", 2)
    assert any(drawn(0, f"c{n}", 1) != drawn(n, f"d{n}", 1) for n in range(1, 4))


def test_a_newcomer_is_asked_next(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1, 1), sites_of=lambda n: 1)
    world.assemble()
    for round in (1, 2):
        world.gather(round)
        world.commit(round)
    world.sites[9] = FakeSite("z", 9)
    world.grid.node_ids.append(9)
    world.gather(3)  # greeted
    world.commit(3)
    assert world.gather(4) == ["z"]
    world.commit(4)
    assert world.gather(5) != ["z"]


def test_over_provision_ends_with_the_first_so_many(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(9, 1, 2, 3), sites_of=lambda n: 3, over_provision=0.3)
    world.assemble()
    assert world.gather(1) == ["b", "c", "d"]
    assert world.outcome.asked == 4 and world.clock() < 5
    (line,) = world.seen("site", status="missing")
    assert line["site"] == "a" and line["reason"] == "no reply before the round ended"


def test_over_provision_makes_up_for_a_failure(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(9, 1, 2, 3), sites_of=lambda n: 3, over_provision=0.3)
    world.sites[2].behave = failing
    world.assemble()
    assert world.gather(1) == ["a", "c", "d"]


def test_a_retry_asks_others_first(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1, 1, 1), sites_of=lambda n: 2, min_sites=2)
    for site in world.sites.values():
        site.behave = failing
    world.assemble()
    assert world.gather(1) == []
    first = set(trained(world, 1))
    assert len(first) == 2
    for site in world.sites.values():
        site.behave = honest
    assert set(world.gather(1, attempt=2)) == {"a", "b", "c", "d"} - first


def test_a_restart_draws_the_same_sites_with_replies_on_disk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sites_of": lambda n: 3, "seed": 3, "deadline": 20.0}
    undisturbed = World(tmp_path / "one", *sites(*[1] * 6), **options)
    undisturbed.assemble()
    expected = undisturbed.gather(1)
    first = World(tmp_path / "two", *sites(*[1] * 6), **options)
    slow = expected[1]
    for site in first.sites.values():
        if site.name == slow:
            site.behave = silent
    first.assemble()
    assert first.gather(1) == [name for name in expected if name != slow]
    second = World(tmp_path / "two", *sites(*[1] * 6), **options)
    second.assemble()
    assert second.gather(1) == expected and trained(second, 1) == [slow]


# -- late replies -----------------------------------------------------------------


@pytest.mark.parametrize(("kind", "weight"), [("inverse", 50.0), ("equal", 100.0), ("drop", None)])
def test_what_a_late_reply_weighs(tmp_path: Path, kind: Any, weight: float | None) -> None:
    world = World(tmp_path, *sites(1, 12), max_staleness=1, deadline=10.0, staleness_weight=kind)
    world.assemble()
    world.gather(1)
    world.commit(1)
    world.sites[1].seconds = 5.0
    if weight is None:
        world.sites[2].seconds = 1.0
        world.clock.now += 10  # both answers of b are there when the round begins
    got = world.gather(2)
    if weight is None:
        # Not waited for: the site is asked for the new round.
        assert got == ["a", "b"] and world.outcome.replies[1].meta.round == 2
        (line,) = world.seen("site", status="late")
        assert "staleness-weight=drop" in line["reason"]
    else:
        assert got == ["a", "b*"] and world.outcome.replies[1].weight == weight


def test_a_dropped_reply_says_why(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 12), deadline=10.0)
    world.assemble()
    world.gather(1)
    world.commit(1)
    world.sites[2].seconds = 5.0
    world.gather(2)
    (line,) = world.seen("site", status="late")
    assert line["reason"] == "dropped: 1 rounds late (max-staleness=0)" and line["staleness"] == 1


@pytest.mark.parametrize("dropped", [1, 2, 5])
def test_after_dropped_replies_a_site_is_told_the_last_that_counted(
    tmp_path: Path, dropped: int
) -> None:
    """``accepted`` in the request is what the site rolls back to."""
    told: list[tuple[int, int]] = []

    def noting(site: FakeSite, request: Request, kind: str) -> Any:
        if kind == "train":
            told.append((request.round, request.accepted))
        return honest(site, request, kind)

    world = World(tmp_path, *sites(1, 1), deadline=10.0)
    world.sites[2].behave = noting
    world.assemble()
    for round in range(1, dropped + 4):
        late = 2 <= round < 2 + dropped
        world.sites[2].seconds = 10.5 if late else 1.0
        record = world.membership.sites["b"]
        record.rest_until = 0  # each of them is asked
        assert world.gather(round) == (["a"] if late else ["a", "b"])
        world.commit(round)
    rounds = range(1, dropped + 4)
    assert told == [
        (round, 0 if round == 1 else 1 if round <= 2 + dropped else round - 1) for round in rounds
    ]
    record = world.membership.sites["b"]
    assert (record.answered, record.late, record.missed) == (3, dropped, 0)


def test_a_slow_site_is_counted_once_a_request(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 12), deadline=10.0)
    world.assemble()
    world.gather(1)
    record = world.membership.sites["b"]
    assert (record.missed, record.late) == (1, 0)
    world.commit(1)
    world.sites[2].behave = silent
    world.gather(2)
    assert (record.missed, record.late, record.answered) == (1, 1, 0)


def test_a_silently_lost_reply_costs_its_site_no_more_than_the_staleness(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1), max_staleness=1, deadline=10.0)
    world.sites[2].behave = silent
    world.assemble()
    world.gather(1)
    world.commit(1)
    world.sites[2].behave = honest
    assert world.gather(2) == ["a"]  # its reply to round 1 could still be folded
    world.commit(2)
    assert world.gather(3) == ["a", "b"]


def test_policies_read_from_the_configuration() -> None:
    config = DiLoCoConfig(sites_per_round="0.5")
    assert [config.sites_of(n) for n in (1, 2, 3, 8)] == [1, 1, 2, 4]
    assert replace(RoundPolicy(config.quorum_of), max_staleness=3).oldest == 3
    policy = RoundPolicy(config.quorum_of, max_staleness=3, staleness_weight="drop")
    assert policy.oldest == 0
