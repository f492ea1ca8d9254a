"""Sites on one cloud half: they begin together, go back together, end together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_geo.calls import Answer, Call
from flower_geo.cloud.group import Group
from flower_geo.cloud.store import HalfStore
from flower_geo.errors import HandshakeRefused, SessionLost
from tests.cloud.counting import Counting


class World:
    """A group, and what it answered."""

    def __init__(self, folder: Path, *sites: str, label: str = "one") -> None:
        self.engine = Counting()
        self.engine.begin(sites)
        store = HalfStore(folder, label)
        self.group = Group(sites, self.engine, store, every=2, patience=10.0)
        self.answers: list[tuple[str, Any]] = []

    def call(self, site: str, kind: str, step: int = 0) -> Any:
        """Make a call and work; the answer, or None while it is parked."""
        before = len(self.answers)
        self.group.serve(site, Call(kind, step), lambda found: self.answers.append((site, found)))
        while self.group.work():
            pass
        self.group.end()
        return self.answers[-1][1] if len(self.answers) > before else None

    def steps(self, first: int, last: int, *sites: str) -> None:
        for step in range(first, last + 1):
            for site in sites:
                assert isinstance(self.call(site, "step", step), Answer)


@pytest.fixture
def world(tmp_path: Path) -> World:
    world = World(tmp_path, "b", "a")
    for site in ("a", "b"):
        assert not world.group.meet(0.0)
        assert world.group.arrive(site, [], 0.0) == set()
    assert world.group.meet(0.0) and world.group.step == 0
    return world


def test_nobody_steps_before_all_are_here(tmp_path: Path) -> None:
    world = World(tmp_path, "a", "b")
    world.group.arrive("a", [], 0.0)
    assert isinstance(world.call("a", "step", 1), SessionLost)
    assert not world.group.meet(9.9) and world.engine.ran == []


def test_a_site_that_does_not_come_is_left_out_and_turned_away_later(tmp_path: Path) -> None:
    world = World(tmp_path, "a", "b")
    world.group.arrive("a", [], 0.0)
    assert world.group.meet(10.0) and world.engine.away == {"b"}
    world.steps(1, 2, "a")
    with pytest.raises(HandshakeRefused, match="goes on without site b"):
        world.group.arrive("b", [], 11.0)
    assert isinstance(world.call("a", "finish"), Answer) and world.group.over


def test_a_site_that_comes_back_takes_the_others_back_to_a_step_all_have(world: World) -> None:
    world.steps(1, 5, "a", "b")
    undisturbed = world.engine.tally
    assert world.group.store.steps() == [4, 2]
    world.group.gone("b", 1.0)
    assert world.group.arrive("b", [2], 2.0) == {"a"}
    assert isinstance(world.call("a", "step", 6), SessionLost)
    world.group.arrive("a", [4, 2], 3.0)
    assert world.group.meet(3.0) and world.group.step == 2 and world.group.epoch == 2
    assert world.group.store.steps() == [2] and world.engine.boundary == 2
    world.steps(3, 5, "a", "b")
    assert world.engine.tally == undisturbed and world.group.store.steps() == [4, 2]


def test_without_a_common_step_all_begin_again(world: World) -> None:
    world.steps(1, 5, "a", "b")
    undisturbed = world.engine.tally
    world.group.arrive("b", [], 1.0)
    world.group.arrive("a", [4, 2], 1.0)
    assert world.group.meet(1.0) and world.group.step == 0 and world.engine.tally == 0.0
    world.steps(1, 5, "a", "b")
    assert world.engine.tally == undisturbed


def test_a_damaged_snapshot_is_passed_over(world: World, tmp_path: Path) -> None:
    world.steps(1, 5, "a", "b")
    (tmp_path / "one" / "step-000004" / "half.safetensors").write_bytes(b"")
    for site in ("a", "b"):
        world.group.arrive(site, [4, 2], 1.0)
    assert world.group.meet(1.0) and world.group.step == 2


def test_all_end_at_once(world: World) -> None:
    world.steps(1, 3, "a", "b")
    assert world.call("a", "finish") is None and not world.group.over
    assert world.call("b", "finish") == Answer({"saved": True}) and world.group.over
    assert [site for site, found in world.answers[-2:]] == ["a", "b"]
    assert world.group.store.steps() == [3, 2]


def test_nobody_ends_while_one_is_away_and_after_a_while_they_do(world: World) -> None:
    world.steps(1, 3, "a", "b")
    world.group.gone("b", 5.0)
    assert world.call("a", "finish") is None
    world.group.look(14.9)
    world.group.end()
    assert not world.group.over and world.engine.away == set()
    world.group.look(15.0)
    world.group.end()
    assert world.group.over and world.engine.away == {"b"} and world.group.done == {"a"}


def test_one_that_died_before_it_kept_its_result_ends_again(world: World) -> None:
    world.steps(1, 3, "a", "b")
    world.call("a", "finish")
    world.call("b", "finish")
    tally = world.engine.tally
    world.group.arrive("b", [3, 2], 1.0)
    assert world.group.meet(1.0) and world.group.step == 3
    assert isinstance(world.call("b", "finish"), Answer)
    assert world.engine.tally == tally and world.group.over


def test_a_new_process_goes_on_from_what_is_on_disk(world: World, tmp_path: Path) -> None:
    world.steps(1, 5, "a", "b")
    undisturbed = world.engine.tally
    again = World(tmp_path, "a", "b")
    assert again.group.step == 4
    again.group.arrive("a", [4, 2], 0.0)
    again.group.arrive("b", [2], 0.0)
    assert again.group.meet(0.0) and again.group.step == 2
    again.steps(3, 5, "a", "b")
    assert again.engine.tally == undisturbed


def test_a_new_process_knows_that_a_round_has_ended(world: World, tmp_path: Path) -> None:
    world.steps(1, 3, "a", "b")
    world.call("a", "finish")
    world.call("b", "finish")
    again = World(tmp_path, "a", "b")
    assert again.group.over and again.engine.tally == world.engine.tally
    assert not World(tmp_path, "a", "b", label="two").group.over
