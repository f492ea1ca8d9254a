"""Time-balanced rounds: steps by speed, and the same again after a restart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Message

from flower_geo.config import DiLoCoConfig
from flower_geo.errors import ConfigError
from flower_geo.resilience import Journal, SiteRecord
from flower_geo.strategies.balance import RECENT, Balance
from tests.strategies.runs import Killed, configured, equal, events, federation, run


def outcome(**sites: Mapping[str, float]) -> Any:
    """Replies by site: steps, seconds and perhaps staleness."""
    replies = [
        SimpleNamespace(
            meta=SimpleNamespace(
                site=site, staleness=values.get("staleness", 0),
                metrics={key: values[key] for key in ("steps", "seconds") if key in values},
            )
        )
        for site, values in sites.items()
    ]  # fmt: skip
    return SimpleNamespace(replies=replies)


def balance(steps: int = 20, **values: Any) -> Balance:
    return Balance(DiLoCoConfig(inner_steps=steps, balance="time", warmup_steps=20, **values))


def test_off_by_default_and_nothing_is_kept() -> None:
    off = Balance(DiLoCoConfig(inner_steps=20))
    off.settle(outcome(a={"steps": 20, "seconds": 1}, b={"steps": 20, "seconds": 9}), 1)
    assert off.steps("b") == 20 and off.state() is None


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [((10, 10), (20, 20)), ((10, 20), (20, 10)), ((10, 30), (20, 6)), ((40, 10), (5, 20)),
     ((1, 1000), (20, 1))],
)  # fmt: skip
def test_the_fastest_takes_all_and_the_others_their_share(
    seconds: tuple[int, int], expected: tuple[int, int]
) -> None:
    found = balance()
    assert found.steps("a") == 20  # nobody was measured
    found.settle(
        outcome(
            a={"steps": 20, "seconds": seconds[0]}, b={"steps": 20, "seconds": seconds[1]}
        ), 1,
    )  # fmt: skip
    assert (found.steps("a"), found.steps("b")) == expected and found.steps("new") == 20


def test_speeds_are_smoothed_and_of_steps_a_second() -> None:
    found = balance()
    found.settle(outcome(a={"steps": 20, "seconds": 10}, b={"steps": 20, "seconds": 20}), 1)
    # Half the steps in the same time as before: the same speed.
    found.settle(outcome(a={"steps": 20, "seconds": 10}, b={"steps": 10, "seconds": 10}), 2)
    assert found.steps("b") == 10
    found.settle(outcome(a={"steps": 20, "seconds": 10}, b={"steps": 10, "seconds": 5}), 3)
    assert found.steps("b") == 15  # half-way to being as fast as a


def test_a_fast_site_that_is_gone_holds_nobody_back_for_ever() -> None:
    found = balance()
    found.settle(outcome(a={"steps": 20, "seconds": 1}, b={"steps": 20, "seconds": 10}), 1)
    for round in range(2, RECENT + 2):
        assert found.steps("b") == 2
        found.settle(outcome(b={"steps": 2, "seconds": 1}), round)
    assert found.steps("b") == 20


def test_a_site_with_its_own_number_of_steps_is_left_alone() -> None:
    found = balance()
    found.settle(outcome(a={"steps": 20, "seconds": 10}, own={"steps": 5, "seconds": 0.1}), 1)
    assert (found.steps("a"), found.steps("own")) == (20, 20)


def test_numbers_that_say_nothing() -> None:
    found = balance()
    found.settle(outcome(a={"steps": 20, "seconds": 0}, b={}, c={"steps": 0, "seconds": 3}), 1)
    assert found.state() == {"round": 1, "speeds": {}}


def test_what_a_site_sees() -> None:
    found = balance(steps=20, rounds=10)
    found.settle(outcome(a={"steps": 20, "seconds": 10}, b={"steps": 20, "seconds": 40}), 1)
    config = DiLoCoConfig(inner_steps=20, balance="time", warmup_steps=20, rounds=10)
    seen = found.config_for(SiteRecord("b"), config)
    assert (seen.inner_steps, seen.warmup_steps, seen.total_steps) == (5, 5, 50)
    assert seen.fingerprint() != config.fingerprint()
    assert found.config_for(SiteRecord("a"), config) is config is found.config_for(None, config)


def test_two_ways_to_one_end_are_refused() -> None:
    with pytest.raises(ValueError, match="two ways to one end"):
        DiLoCoConfig(balance="time", inner_seconds=3.0)
    with pytest.raises(ConfigError, match="balance"):
        configured(Path(), balance="time", **{"inner-seconds": 3.0})


# -- whole runs -------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "rounds": 4, "inner-steps": 8, "warmup-steps": 4, "balance": "time", "deadline": 5.0,
}  # fmt: skip
PACE = {"site-0": 0.5, "site-1": 2.0, "site-2": 1.0}


def paced(site: str, message: Message, reply: Message) -> list[Message]:
    """Each site's seconds by its pace, so that speeds do not depend on this machine."""
    if message.metadata.message_type == "train":
        metrics = reply.content.metric_records["metrics"]
        metrics["seconds"] = float(metrics["steps"]) * PACE[site]  # type: ignore[arg-type]
    return [reply]


def steps_of(config: DiLoCoConfig) -> dict[tuple[str, int], float]:
    lines = [e for e in events(config, "site") if e["status"] == "accepted"]
    return {(e["site"], e["round"]): e["steps"] for e in lines}


def test_all_end_at_about_the_same_time_weighted_by_tokens(tmp_path: Path) -> None:
    config = configured(tmp_path, **SETTINGS)
    run(config, federation(tmp_path, 3, paced))
    steps = steps_of(config)
    assert [steps[site, 1] for site in PACE] == [8, 8, 8]
    for round in (2, 3, 4):
        assert [steps[site, round] for site in PACE] == [8, 2, 4]
        assert {steps[site, round] * pace for site, pace in PACE.items()} == {4.0}
    entry = Journal(Path(config.run_dir) / "diloco/journal.jsonl").entries()[-1]
    weights = {r["site"]: r["weight"] for r in entry["replies"]}
    assert weights["site-0"] == 4 * weights["site-1"] == 2 * weights["site-2"]


@pytest.mark.parametrize("when", [5, 8, 11])
def test_a_run_killed_and_resumed_is_the_undisturbed_one(tmp_path: Path, when: int) -> None:
    config = configured(tmp_path / "a", **SETTINGS)
    undisturbed = run(config, federation(tmp_path / "a", 3, paced))
    other = configured(tmp_path / "b", **SETTINGS)
    seen = 0

    def dying(site: str, message: Message, reply: Message) -> list[Message]:
        nonlocal seen
        seen += message.metadata.message_type == "train"
        if seen == when:
            raise Killed
        return paced(site, message, reply)

    with pytest.raises(Killed):
        run(other, federation(tmp_path / "b", 3, dying))
    assert equal(run(other, federation(tmp_path / "b", 3, paced)), undisturbed)
    assert steps_of(other) == steps_of(config)
    states = [
        json.loads((Path(c.run_dir) / "diloco/checkpoints/round-000004/state.json").read_text())
        for c in (config, other)
    ]
    assert states[0]["state"]["balance"] == states[1]["state"]["balance"]
