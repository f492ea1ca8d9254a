"""A round: when it ends, who is asked, and what a fault costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, Error

from flower_geo.aggregation import weighted_mean
from flower_geo.config import DiLoCoConfig
from flower_geo.errors import NotEnoughSites
from flower_geo.messages import Reply, Request
from flower_geo.resilience.rounds import MAX_NEEDS
from tests.resilience.scripted import BASE, HASH, FakeSite, World, delta, honest


def sites(*seconds: float) -> list[FakeSite]:
    return [FakeSite("abcdefgh"[i], i + 1, s) for i, s in enumerate(seconds)]


def failing(site: FakeSite, request: Request, kind: str) -> Any:
    return honest(site, request, kind) if kind == "query" else Error(2, "boom")


def silent(site: FakeSite, request: Request, kind: str) -> Any:
    return honest(site, request, kind) if kind == "query" else None


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
    config = DiLoCoConfig(quorum=quorum)  # type: ignore[call-arg]
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
    world.sites[2].behave = lacking
    world.assemble()
    world.gather(1)
    world.grid.node_ids = [1]
    world.clock.now += 60
    assert world.gather(1, attempt=2) == ["a"]


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


def needing(times: int) -> Any:
    left = {"needs": times}

    def behave(site: FakeSite, request: Request, kind: str) -> Any:
        done = honest(site, request, kind)
        if kind == "query" or left["needs"] <= 0:
            return done
        left["needs"] -= 1
        none: Any = {"held_version": -1, "held_hash": "", "arrays": None}
        return replace(done, status="need", **none)  # type: ignore[type-var]

    return behave


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


# -- late replies ---------------------------------------------------------------


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
    assert world.gather(3) == ["a", "b"]
    assert world.membership.sites["b"].failed == 0


# -- greetings ------------------------------------------------------------------


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


# -- evaluation -----------------------------------------------------------------


def evaluated(world: World) -> list[tuple[str, float, float]]:
    return world.engine.evaluate(5, lambda record: world.request(record, 5))


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
