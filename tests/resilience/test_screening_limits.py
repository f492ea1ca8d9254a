"""Losses that exploded, claims beyond what was asked, answers to another life."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flower_geo.errors import ReplyRefused
from flower_geo.messages import Request
from flower_geo.resilience import Screen
from tests.resilience.scripted import BASE, HASH, FakeSite, World, honest, sites

CONFIG = {"inner-steps": 4, "batch-size": 2, "grad-accum": 3, "seq-len": 17, "inner-seconds": 0.0}
REQUEST = Request("run", "uid", round=1, base_hash=HASH, fingerprint="f", config=CONFIG)


def reply(request: Any = REQUEST, **metrics: float) -> Any:
    done: Any = honest(FakeSite("a", 1), request, "train")
    return replace(done, metrics={"train-loss": 3.0, "tokens": 384.0, **metrics})


def passes(screen: Screen, given: Any, request: Request = REQUEST) -> bool:
    try:
        screen.check(request, given, BASE)
    except ReplyRefused:
        return False
    return True


# -- losses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usual", "loss", "good"),
    [(3.0, 8.9, True), (3.0, 9.1, False), (3.0, 1e30, False), (8.0, 23.0, True),
     # Near zero a factor says nothing: it takes a nat more, too.
     (0.01, 0.9, True), (0.01, 1.1, False), (0.0, 0.9, True), (0.0, 1.1, False)],
)  # fmt: skip
def test_a_loss_that_exploded(usual: float, loss: float, good: bool) -> None:
    screen = Screen(max_loss_factor=3.0)
    for _ in range(Screen.MIN_HISTORY):
        assert passes(screen, reply(**{"train-loss": usual}))
    assert passes(screen, reply(**{"train-loss": loss})) == good
    assert len(screen.losses) == Screen.MIN_HISTORY + good == len(screen.norms)


def test_the_reason_names_both_losses_and_zero_switches_it_off() -> None:
    screen, off = Screen(max_loss_factor=3.0), Screen(max_loss_factor=0.0)
    for each in (screen, off):
        each.losses.extend([2.0] * 5)
    with pytest.raises(ReplyRefused, match="training loss 50 is more than 3 times the usual 2"):
        screen.check(REQUEST, reply(**{"train-loss": 50.0}), BASE)
    assert passes(off, reply(**{"train-loss": 50.0}))


def test_what_is_usual_survives_a_checkpoint() -> None:
    screen, other = Screen(), Screen()
    screen.check(REQUEST, reply(), BASE)
    other.norms.extend([9.0, 9.0])
    other.restore(screen.state())
    assert other.state() == screen.state() and list(other.losses) == [3.0]
    other.restore({"norms": [1.0]})  # as older checkpoints have it
    assert list(other.norms) == [1.0] and list(other.losses) == []


# -- claims -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claims", "good"),
    [({"tokens": 384.0, "steps": 4.0, "examples": 24.0}, True), ({"tokens": 4 * 384.0}, True),
     ({"tokens": 4 * 384.0 + 1}, False), ({"tokens": 1e12}, False), ({"steps": 17.0}, False),
     ({"examples": 97.0}, False), ({"examples": 96.0, "steps": 16.0}, True)],
)  # fmt: skip
def test_claims_have_a_limit(claims: dict[str, float], good: bool) -> None:
    assert passes(Screen(max_claim_factor=4.0), reply(**claims)) == good
    assert passes(Screen(max_claim_factor=0.0), reply(**claims))


def test_the_reason_says_how_to_allow_it() -> None:
    with pytest.raises(ReplyRefused, match=r"1e\+06 tokens, more than 4 times .*max-claim-factor"):
        Screen(max_claim_factor=4.0).check(REQUEST, reply(tokens=1e6), BASE)


@pytest.mark.parametrize("changed", [{"inner-seconds": 5.0}, {"batch-size": "2"}])
def test_no_limit_where_nobody_knows_how_much_was_asked(changed: dict[str, Any]) -> None:
    request = replace(REQUEST, config=CONFIG | changed)
    assert passes(Screen(max_claim_factor=4.0), reply(request, tokens=1e6), request)


def test_a_false_claim_costs_its_site_and_not_the_mean(tmp_path: Path) -> None:
    world = World(tmp_path, *sites(1, 1))
    world.screen.max_claim_factor = 4.0
    hello = world.hello
    world.hello = lambda: replace(hello(), config=CONFIG)  # type: ignore[method-assign]

    def greedy(site: FakeSite, request: Request, kind: str) -> Any:
        done: Any = honest(site, request, kind)
        return replace(done, metrics={**done.metrics, "tokens": 1e9}) if kind == "train" else done

    world.sites[2].behave = greedy
    world.assemble()
    assert world.gather(1) == ["a"]
    (line,) = world.seen("site", status="refused")
    assert "it claims 1e+09 tokens" in line["reason"]


# -- lives of the server ----------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "what"),
    [({"base_hash": "other"}, "from other weights"), ({"fingerprint": "g"}, "another config")],
)
def test_an_answer_to_an_earlier_life_is_named_so(changed: dict[str, Any], what: str) -> None:
    given = replace(reply(), **changed)
    with pytest.raises(ReplyRefused, match=f"{what}.*earlier life of the coordinator"):
        Screen().check(REQUEST, given, BASE)


def test_a_restart_knows_what_earlier_replies_on_disk_were_like(tmp_path: Path) -> None:
    first = World(tmp_path, *sites(1, 1, 1, 1))
    first.assemble()
    first.gather(1)
    second = World(tmp_path, *sites(1, 1, 1, 1))
    second.assemble()
    for _ in range(2):  # a second try counts nothing twice
        second.gather(1)
    assert sorted(second.screen.norms) == sorted(first.screen.norms)
    assert list(second.screen.losses) == [3.0] * 4
    assert second.membership.sites["a"].answered == 1
