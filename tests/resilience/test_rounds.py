"""A round: when it ends, who is asked, and what a fault costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord

from flower_geo.aggregation import weighted_mean
from flower_geo.config import DiLoCoConfig
from flower_geo.messages import Reply, Request
from flower_geo.resilience.replies import MAX_NEEDS
from tests.resilience.scripted import (
    BASE,
    HASH,
    FakeSite,
    World,
    delta,
    failing,
    honest,
    needing,
    silent,
    sites,
)

# -- when a round ends ----------------------------------------------------------


def test_all_waits_for_all_and_no_longer(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 30, 7))
    assert world.assemble() == ["a", "b", "c"]
    began = world.clock()
    assert world.gather(1) == ["a", "b", "c"]
    assert 30 <= world.clock() - began <= 31
    assert world.outcome.asked == 3 and set(world.outcome.norms) == {"a", "b", "c"}
    lines = world.seen("site", status="accepted")
    assert [line["site"] for line in lines] == ["a", "c", "b"]
    assert world.seen("waiting")[0]["pending"] == ["b", "c"]


def test_a_count_ends_the_round_early_and_names_the_missing(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 50, 7), quorum=2)
    world.assemble()
    assert world.gather(1) == ["a", "c"]
    assert world.clock() < 9
    assert [line["site"] for line in world.seen("site", status="missing")] == ["b"]


@pytest.mark.parametrize(("quorum", "wanted"), [("all", 4), ("3", 3), ("9", 4), ("0.5", 2),
                                                ("0.51", 3), ("0.01", 1), ("0.75", 3)])  # fmt: skip
def test_a_quorum_is_a_count_a_fraction_or_all(tmp_path: Path, quorum: str, wanted: int) -> None:
    config = DiLoCoConfig(quorum=quorum)
    world = World(tmp_path, *sites(1, 2, 3, 4))
    world.engine.policy = replace(world.engine.policy, quorum_of=config.quorum_of)
    world.assemble()
    assert len(world.gather(1)) == wanted


def test_the_deadline_ends_a_round_with_what_there_is(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 500), deadline=20.0)
    world.assemble()
    began = world.clock()
    assert world.gather(1) == ["a"]
    assert world.clock() - began == pytest.approx(20.0)


def test_failures_do_not_make_a_round_wait(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 2))
    world.sites[2].behave = failing
    world.assemble()
    assert world.gather(1) == ["a"] and world.clock() < 5
    (line,) = world.seen("site", status="failed")
    assert line["site"] == "b" and "boom" in line["reason"]
    assert world.membership.sites["b"].failed == 1


def test_nobody_there(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1))
    world.assemble()
    world.grid.node_ids = []
    assert world.gather(1) == [] and world.outcome.asked == 0


def test_a_node_that_left_between_two_looks(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1))
    world.assemble()
    world.grid.refused[2] = [None]
    assert world.gather(1) == ["a"] and world.clock() < 5
    assert world.seen("fault", what="not sent", site="b")
    world.grid.refused.clear()
    assert world.gather(1, attempt=2) == ["a", "b"]


def test_a_site_that_goes_while_it_is_asked_again_costs_only_itself(tmp_path: Path) -> None:
    """Its first answer, that it lacks the base, arrives after its node is gone."""

    def lacking(site: FakeSite, request: Request, kind: str) -> Any:
        done = honest(site, request, kind)
        return replace(done, status="need", arrays=None) if kind == "train" else done  # type: ignore[type-var]

    world = World(tmp_path, *sites(1, 30), deadline=10.0)
    world.sites[1].behave = silent
    world.sites[2].behave = lacking
    world.assemble()
    assert world.gather(1) == []
    world.sites[1].behave = honest
    world.grid.node_ids = [1]
    world.clock.now += 60
    assert world.gather(1, attempt=2) == ["a"]
    assert ("train", 1) not in world.sites[2].asked[2:]


# -- retries, duplicates, restarts ----------------------------------------------


def test_a_retry_asks_only_those_whose_reply_is_missing(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1), deadline=5.0)
    world.sites[2].behave = silent
    world.assemble()
    assert world.gather(1) == ["a"]
    world.sites[2].behave = honest
    assert world.gather(1, attempt=2) == ["a", "b"]
    assert world.sites[1].asked == [("query", 0), ("train", 1)]
    assert world.sites[2].asked == [("query", 0), ("train", 1), ("train", 1)]


def test_both_answers_to_a_request_sent_twice_count_once(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 12), deadline=10.0)
    world.assemble()
    world.gather(1)
    assert world.gather(1, attempt=2) == ["a", "b"]
    world.commit(1)
    world.sites[2].seconds = 1
    world.clock.now += 60
    assert world.gather(2) == ["a", "b"]
    record = world.membership.sites["b"]
    assert (record.refused, record.failed) == (0, 0) and world.seen("site", status="refused") == []


def test_a_restarted_server_goes_on_from_its_spool(tmp_path: Path) -> None:
    first = World(tmp_path, *sites(1, 99), deadline=5.0)
    first.assemble()
    assert first.gather(1) == ["a"]
    second = World(tmp_path, *sites(1, 1))
    second.assemble()
    assert second.gather(1) == ["a", "b"] and second.outcome.asked == 2
    assert second.sites[1].asked == [("query", 0)]


@pytest.mark.parametrize("changed", ["base_hash", "fingerprint", "site", "damage"])
def test_a_spooled_reply_that_does_not_fit_is_asked_for_again(tmp_path: Path, changed: str) -> None:
    first = World(tmp_path, *sites(1))
    first.assemble()
    first.gather(1)
    if changed == "damage":
        file = next((tmp_path / "spool").rglob("blobs.safetensors"))
        file.write_bytes(file.read_bytes()[:-1] + b"\x55")
    second = World(tmp_path, *sites(1))
    if changed == "site":
        second.sites[1].name = "z"
    elif changed != "damage":
        hello = second.hello
        second.hello = lambda: replace(hello(), **{changed: "other"})  # type: ignore[method-assign,arg-type]
    second.assemble()
    assert second.gather(1) == ["z" if changed == "site" else "a"]
    assert second.sites[1].asked[-1] == ("train", 1)


# -- bad replies ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"site": "a"}, "site b answers as a"), ({"round": 9}, "not round 1"),
     ({"metrics": {"tokens": 0.0}}, "trained on nothing"), ({"metrics": {}}, "trained on nothing"),
     ({"arrays": None}, "no update"), ({"metrics": {"tokens": -1.0}}, "tokens=-1"),
     ({"status": "refused", "detail": "disk full"}, "disk full"), ({"site": "../b"}, "site name")],
)  # fmt: skip
def test_a_bad_reply_costs_itself(tmp_path: Path, changed: Any, reason: str) -> None:
    def bad(site: FakeSite, request: Request, kind: str) -> Any:
        done = honest(site, request, kind)
        return replace(done, **changed) if kind == "train" else done  # type: ignore[type-var]

    world = World(tmp_path, *sites(1, 1))
    world.sites[2].behave = bad
    world.assemble()
    assert world.gather(1) == ["a"]
    assert [reason in e["reason"] for e in world.seen("site", site="b")] == [True]
    assert len(world.screen.norms) == 1


def test_a_refusal_does_not_forget_what_the_site_holds(tmp_path: Path) -> None:
    def locked(site: FakeSite, request: Request, kind: str) -> Any:
        if kind == "query":
            return honest(site, request, kind)
        return Reply(status="refused", site=site.name, detail="in use", error="StateLocked")

    world = World(tmp_path, *sites(1))
    world.sites[1].behave = locked
    world.assemble()
    world.gather(1)
    record = world.membership.sites["a"]
    assert (record.held_version, record.held_hash) == (0, HASH)


def test_flowers_own_arrays_are_spooled_so_that_they_can_be_folded(tmp_path: Path) -> None:
    def plain(site: FakeSite, request: Request, kind: str) -> Any:
        done = honest(site, request, kind)
        arrays = {name: Array(torch.ones_like(t).numpy()) for name, t in BASE.items()}
        return replace(done, arrays=ArrayRecord(arrays)) if kind == "train" else done  # type: ignore[type-var]

    world = World(tmp_path, *sites(1))
    world.sites[1].behave = plain
    world.assemble()
    assert world.gather(1) == ["a"]
    mean = dict(weighted_mean(BASE, world.outcome.replies))
    assert torch.equal(mean["w"], BASE["w"] - 1)


@pytest.mark.parametrize("times", [1, MAX_NEEDS, MAX_NEEDS + 1, 10_000])
def test_a_site_that_lacks_the_base_is_asked_again_but_not_for_ever(
    tmp_path: Path, times: int
) -> None:
    world = World(tmp_path, *sites(1))
    world.sites[1].behave = needing(times)
    world.assemble()
    heals = times <= MAX_NEEDS
    assert world.gather(1) == (["a"] if heals else [])
    assert world.sites[1].asked.count(("train", 1)) == (times if heals else MAX_NEEDS) + 1
    record = world.membership.sites["a"]
    assert record.held_version == (0 if heals else -1) and record.refused == (not heals)


# -- evaluation -----------------------------------------------------------------


def evaluated(world: World) -> list[tuple[str, float, float]]:
    found = world.engine.evaluate(5, lambda record: world.request(record, 5))
    return [(each.site, each.loss, each.tokens) for each in found]


def test_evaluation_leaves_out_who_fails(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1, 1, 1, 1, 1), deadline=20.0)

    def answering(**changed: Any) -> Any:
        def behave(site: FakeSite, request: Request, kind: str) -> Any:
            done = honest(site, request, kind)
            return replace(done, **changed) if kind == "evaluate" else done  # type: ignore[type-var]

        return behave

    world.sites[2].behave = failing
    world.sites[3].behave = silent
    world.sites[4].behave = answering(base_hash="of another version")
    world.sites[5].behave = answering(status="refused", detail="no")
    world.sites[6].behave = answering(site="a")
    world.assemble()
    assert evaluated(world) == [("a", 2.0, 10.0)]
    # What is still open from then does not count later.
    world.sites = {1: world.sites[1], 3: FakeSite("c", 3)}
    world.grid.node_ids = [1, 3]
    world.assemble()
    assert evaluated(world) == [("a", 2.0, 10.0), ("c", 2.0, 10.0)]


@pytest.mark.parametrize("times", [1, 10_000])
def test_evaluation_of_a_site_without_the_base(tmp_path: Path, times: int) -> None:
    world = World(tmp_path, *sites(1))
    world.sites[1].behave = needing(times)
    world.assemble()
    assert evaluated(world) == ([("a", 2.0, 10.0)] if times == 1 else [])
    assert len(world.sites[1].asked) <= MAX_NEEDS + 2


def test_what_a_round_sent_is_counted_by_site(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1))
    world.assemble()
    payload = delta()
    hello = world.hello
    world.hello = lambda: replace(hello(), payload="snapshot", arrays=payload)  # type: ignore[method-assign]
    world.gather(1)
    size = sum(len(array.data) for array in payload.values())
    assert world.outcome.down == {"a": size, "b": size} and world.outcome.bytes_up == 2 * size
