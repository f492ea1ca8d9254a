"""Membership by site name, and the screen every reply passes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord

from flower_geo.compression import codec, pack
from flower_geo.errors import ReplyRefused
from flower_geo.messages import Reply, Request
from flower_geo.resilience.membership import Membership
from flower_geo.resilience.screening import Screen
from tests.resilience.scripted import BASE, HASH, delta

REQUEST = Request("run", "uid", round=4, version=3, base_hash=HASH, fingerprint="f")
REPLY = Reply(
    status="done", site="a", round=4, version=3, base_hash=HASH, fingerprint="f", kind="delta",
    metrics={"train-loss": 1.0, "loss-last": 1.0}, arrays=delta(),
)  # fmt: skip


def hello(site: str, version: int = 0, hash: str = "h") -> Reply:
    return Reply(status="done", site=site, held_version=version, held_hash=hash, data="text")


def members(*names: str) -> Membership:
    membership = Membership()
    for node, name in enumerate(names, start=1):
        membership.greeting(node)
        membership.welcome(node, hello(name))
    return membership


def chosen(membership: Membership, round: int, at_least: int = 1, nodes: Any = (1, 2, 3)) -> Any:
    return [record.name for record in membership.choose(nodes, round, at_least)]


# -- membership -----------------------------------------------------------------


def test_nodes_are_greeted_once_and_again_when_they_came_back() -> None:
    membership = Membership()
    assert membership.unknown([3, 1, 2]) == [1, 2, 3]
    membership.greeting(1)
    membership.greeting(2)
    assert membership.unknown([3, 1, 2]) == [3]
    membership.online([2, 3])
    assert membership.unknown([3, 1, 2]) == [1, 3]
    membership.forget(2)
    assert membership.unknown([1, 2, 3]) == [1, 2, 3]
    membership.forget(99)


def test_a_welcome_enters_what_the_site_holds() -> None:
    membership = Membership()
    assert membership.welcome(9, hello("b", 4, "hash")) is None
    record = membership.sites["b"]
    assert (record.node_id, record.held_version, record.held_hash) == (9, 4, "hash")
    assert record.data == "text"


def test_a_new_node_takes_over_and_keeps_the_sites_history() -> None:
    membership = members("a", "b")
    record = membership.sites["a"]
    record.accepted, record.consumed = 5, 100
    replaced = membership.welcome(77, hello("a", 2))
    assert replaced is not None and replaced.node_id == 1
    assert membership.sites["a"] is record and record.node_id == 77
    assert (record.accepted, record.consumed, record.held_version) == (5, 100, 2)
    assert membership.welcome(77, hello("a")) is None
    assert chosen(membership, 1, nodes=[1, 2]) == ["b"]


def test_sites_are_in_the_order_of_their_names_and_offline_ones_are_out() -> None:
    membership = members("c", "a", "b")
    assert chosen(membership, 1) == ["a", "b", "c"]
    assert chosen(membership, 1, nodes=[3, 1]) == ["b", "c"]
    assert membership.sites["a"].node_id is None
    # The same node id again says nothing: the site is greeted first.
    assert chosen(membership, 1) == ["b", "c"]
    assert membership.unknown([1, 2, 3]) == [2]


def test_who_was_turned_away_and_left_is_not_named_any_more() -> None:
    membership = members("a")
    membership.turned_away[5] = "its data is missing"
    membership.online([1, 5])
    assert membership.turned_away == {5: "its data is missing"}
    membership.online([1])
    assert membership.turned_away == {}


def test_a_failing_site_rests_1_2_4_8_rounds() -> None:
    membership = members("a", "b")
    record, rests, round = membership.sites["a"], [], 1
    for _ in range(7):
        record.fail(round)
        rested = 0
        while "a" not in chosen(membership, round + 1 + rested):
            rested += 1
        rests.append(rested)
        round += 1 + rested
    assert rests == [0, 1, 2, 4, 8, 8, 8] and record.failed == 7


def test_a_success_ends_the_rest() -> None:
    membership = members("a", "b")
    record = membership.sites["a"]
    for _ in range(5):
        record.fail(1)
    assert chosen(membership, 2) == ["b"]
    assert chosen(membership, 2, at_least=2) == ["a", "b"]
    record.succeed()
    assert chosen(membership, 3) == ["a", "b"] and record.failures_in_a_row == 0


def test_resting_sites_are_woken_only_when_needed_and_only_if_there() -> None:
    membership = members("a", "b", "c")
    for name in ("a", "b"):
        membership.sites[name].fail(1)
        membership.sites[name].fail(1)
    assert chosen(membership, 2) == ["c"]
    assert chosen(membership, 2, at_least=2) == ["a", "b", "c"]
    assert chosen(membership, 2, at_least=3, nodes=[1, 3]) == ["a", "c"]


def test_state_survives_json_without_node_ids() -> None:
    membership = members("b", "a")
    membership.sites["a"].fail(3)
    membership.sites["b"].succeed()
    membership.sites["b"].consumed = 2**40
    state = json.loads(json.dumps(membership.state()))
    assert [entry["name"] for entry in state] == ["a", "b"]
    assert all("node_id" not in entry for entry in state)
    other = Membership()
    other.restore(state)
    assert other.state() == membership.state()
    assert other.online([1, 2]) == [] and other.unknown([1, 2]) == [1, 2]


# -- screen ---------------------------------------------------------------------


def refused(reply: Reply, match: str, request: Request = REQUEST) -> None:
    screen = Screen()
    with pytest.raises(ReplyRefused, match=match):
        screen.check(request, reply, BASE)
    assert list(screen.norms) == []


def test_the_norm_of_a_good_reply() -> None:
    assert Screen().check(REQUEST, REPLY, BASE) == pytest.approx(math.sqrt(17))
    local = {name: tensor - 2 for name, tensor in BASE.items()}
    weights = replace(REPLY, kind="weights", arrays=pack(local, codec("fp32")))
    assert Screen().check(REQUEST, weights, BASE) == pytest.approx(2 * math.sqrt(17))


@pytest.mark.parametrize(
    "echo", [{"round": 3}, {"version": 2}, {"base_hash": "other"}, {"fingerprint": "g"}]
)
def test_an_answer_to_another_question(echo: dict[str, Any]) -> None:
    refused(replace(REPLY, **echo), "not round 4 from version 3")


def test_no_update() -> None:
    refused(replace(REPLY, arrays=None), "no update")
    refused(replace(REPLY, kind="none"), "no update")


@pytest.mark.parametrize("key", ["train-loss", "loss-last"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite(key: str, value: float) -> None:
    refused(replace(REPLY, metrics={key: value}), f"{key} is not finite")


def with_arrays(**arrays: Array) -> Reply:
    assert REPLY.arrays is not None
    return replace(REPLY, arrays=ArrayRecord({**REPLY.arrays, **arrays}))


def blob(tensor: torch.Tensor) -> Array:
    return Array("float32", tuple(tensor.shape), "geo/1", codec("fp32").encode(tensor))


def test_arrays_that_are_not_the_models() -> None:
    assert REPLY.arrays is not None
    lacking = ArrayRecord({"b": REPLY.arrays["b"]})
    refused(replace(REPLY, arrays=lacking), "lacks w")
    refused(with_arrays(extra=blob(torch.ones(2))), "has extra")
    refused(with_arrays(w=blob(torch.ones(4, 3))), "shape")
    refused(replace(REPLY, arrays=ArrayRecord()), "missing")
    refused(with_arrays(w=Array("float32", (3, 4), "pickle", b"cos\nsystem")), "tensor w")


@pytest.mark.parametrize("cut", [0, 1, 10, 20])
def test_bytes_that_are_not_what_they_claim(cut: int) -> None:
    whole = blob(torch.ones(3, 4))
    refused(with_arrays(w=Array("float32", (3, 4), "geo/1", whole.data[:cut])), "w")
    spoilt = whole.data[:-1] + bytes([whole.data[-1] ^ 1])
    refused(with_arrays(w=Array("float32", (3, 4), "geo/1", spoilt)), "w")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite(value: float) -> None:
    plain = Array(torch.full((3, 4), value).numpy())
    refused(with_arrays(w=plain), "w")


def test_an_unusual_norm_needs_a_history_first() -> None:
    screen = Screen(max_norm_factor=10.0)
    huge = replace(REPLY, arrays=delta(1000.0))
    for _ in range(Screen.MIN_HISTORY):
        screen.check(REQUEST, REPLY, BASE)
    with pytest.raises(ReplyRefused, match="more than 10 times the usual"):
        screen.check(REQUEST, huge, BASE)
    screen.check(REQUEST, replace(REPLY, arrays=delta(9.9)), BASE)
    assert len(screen.norms) == Screen.MIN_HISTORY + 1
    assert Screen().check(REQUEST, huge, BASE) > 4000
    off = Screen(max_norm_factor=0)
    off.norms.extend(screen.norms)
    assert off.check(REQUEST, huge, BASE) > 4000


def test_the_median_is_not_moved_by_one_and_its_memory_is_bounded() -> None:
    screen = Screen(max_norm_factor=2.0, memory=5)
    screen.norms.extend([1.0, 1.0, 1.0, 1.0, 1e9])
    with pytest.raises(ReplyRefused):
        screen.check(REQUEST, REPLY, BASE)
    screen.norms.extend([4.0] * 9)
    assert screen.check(REQUEST, REPLY, BASE) == pytest.approx(math.sqrt(17))
    assert len(screen.norms) == 5


def test_norms_restore() -> None:
    first = Screen()
    for _ in range(Screen.MIN_HISTORY):
        first.check(REQUEST, REPLY, BASE)
    second = Screen()
    second.norms.extend(json.loads(json.dumps(list(first.norms))))
    with pytest.raises(ReplyRefused, match="times the usual"):
        second.check(REQUEST, replace(REPLY, arrays=delta(50.0)), BASE)
