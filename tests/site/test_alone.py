"""A site on its own beside the federation: the same steps, its own work only, through restarts."""

from __future__ import annotations

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.errors import TrainingError
from flower_geo.site import alone
from flower_geo.site.state import Generation
from flower_geo.site.watch import Leaving, Watch
from flower_geo.site.work import evaluate_request, train_request
from flower_geo.training import InnerLoop
from tests.site.adapter_requests import AdapterDesk
from tests.site.requests import blobs, folder_of, state_of, update


@pytest.fixture(scope="module")
def both() -> AdapterDesk:
    return AdapterDesk(**{"local-baseline": True, "snapshot-steps": 1, "dropout": 0.1})


def stored(node: dict[str, Any], round: int) -> Generation:
    found = state_of(node).load(round)
    assert found is not None
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def weights(generation: Generation) -> dict[str, Tensor]:
    prefix = "weights/"
    return {k.removeprefix(prefix): t for k, t in generation.alone.items() if k.startswith(prefix)}


def go_on(desk: AdapterDesk, node: dict[str, Any], rounds: int, watch: Watch | None = None) -> Any:
    """Rounds of a federation of one: the next version is what came of the one before."""
    reply = train_request(desk.request(1), node, watch)
    for round in range(2, rounds + 1):
        version = update(reply)
        reply = train_request(desk.snapshot(version, round - 1, round), node, watch)
    return reply


def test_alone_is_what_a_federation_of_one_makes(
    both: AdapterDesk, harbour: dict[str, Any]
) -> None:
    reply = go_on(both, harbour, 3)
    generation = stored(harbour, 3)
    assert same(weights(generation), update(reply))
    assert {k for k in generation.alone if k.startswith("inner/rng")}
    assert reply.metrics["tokens"] > 0 and generation.consumed == 3 * 3 * 2


def test_alone_takes_nothing_from_the_federation(
    both: AdapterDesk, harbour: dict[str, Any]
) -> None:
    go_on(both, harbour, 2)
    lonely = weights(stored(harbour, 2))
    shutil.rmtree(harbour["state-dir"])
    train_request(both.request(1), harbour)
    moved = {name: tensor + 0.05 for name, tensor in both.initial.items()}
    reply = train_request(both.snapshot(moved, 1, 2), harbour)
    assert same(weights(stored(harbour, 2)), lonely)
    assert not same(update(reply), lonely)


def test_the_reply_is_the_same_with_and_without(harbour: dict[str, Any]) -> None:
    replies = []
    for wanted in (False, True):
        desk = AdapterDesk(**{"local-baseline": wanted, "dropout": 0.1})
        replies.append(go_on(desk, harbour, 2))
        shutil.rmtree(harbour["state-dir"])
    assert blobs(replies[0]) == blobs(replies[1])


def test_without_it_nothing_is_kept_of_it(lora: AdapterDesk, harbour: dict[str, Any]) -> None:
    reply = go_on(lora, harbour, 2)
    assert not stored(harbour, 2).alone and "alone" not in stored(harbour, 2).fields
    assert not (folder_of(harbour) / "gen-000002" / "alone.safetensors").exists()
    found = evaluate_request(lora.snapshot(update(reply), 2, 2, accepted=2), harbour).metrics
    assert found["loss-base"] > found["loss-before"] and "loss-local" not in found


class _Ends(Watch):
    """Tells the site to end after so many steps of any kind."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def step(self, done: int, of: int | None, loss: Tensor) -> None:
        self.left -= 1

    def leaving(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize("steps", [2, 4, 5])
def test_broken_off_and_asked_again_it_ends_with_the_same_bits(
    both: AdapterDesk, harbour: dict[str, Any], steps: int
) -> None:
    """Three steps with the federation, three alone: told to end in the midst of either."""
    whole = go_on(both, harbour, 2)
    undisturbed = stored(harbour, 2)
    shutil.rmtree(harbour["state-dir"])
    version = update(train_request(both.request(1), harbour))
    with pytest.raises(Leaving):
        train_request(both.snapshot(version, 1, 2), harbour, _Ends(steps))
    assert (state_of(harbour).load(2) is not None) == (steps > 3)
    reply = train_request(both.snapshot(version, 1, 2), harbour)
    assert blobs(reply) == blobs(whole)
    assert same(stored(harbour, 2).alone, undisturbed.alone)
    assert not (folder_of(harbour) / "snapshot").exists()


def test_killed_before_its_own_steps_it_takes_them_when_asked_again(
    both: AdapterDesk, harbour: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on(both, harbour, 1)
    wanted = stored(harbour, 1).alone
    shutil.rmtree(harbour["state-dir"])

    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("flower_geo.site.work.train_alone", killed)
        with pytest.raises(Killed):
            train_request(both.request(1), harbour)
    trained = stored(harbour, 1)
    assert not trained.alone and trained.reply
    steps = 0
    run = InnerLoop.run

    def counting(self: InnerLoop, *values: Any, **named: Any) -> Any:
        nonlocal steps
        steps += named["steps"]
        return run(self, *values, **named)

    monkeypatch.setattr(InnerLoop, "run", counting)
    train_request(both.request(1), harbour)
    assert same(stored(harbour, 1).alone, wanted) and steps == 3
    train_request(both.request(1), harbour)
    assert steps == 3


def test_it_follows_the_rounds_that_count(both: AdapterDesk, harbour: dict[str, Any]) -> None:
    version = update(train_request(both.request(1), harbour))
    lost = both.snapshot(version, 1, 2)
    train_request(lost, harbour)
    second = stored(harbour, 2)
    # Round 2 did not count; round 3 goes on from round 1 and takes the same examples.
    train_request(replace(both.snapshot(version, 1, 3), accepted=1, position=3.0), harbour)
    third = stored(harbour, 3)
    assert third.parent == 1 and third.consumed == second.consumed
    assert same(third.alone, second.alone)


def test_figures_of_base_alone_and_federated(
    both: AdapterDesk, harbour: dict[str, Any], tmp_path: Path
) -> None:
    reply = go_on(both, harbour, 3)
    version = update(reply)
    found = evaluate_request(both.snapshot(version, 3, 3, accepted=3), harbour).metrics
    assert found["loss-local"] == found["loss-before"] < found["loss-base"]
    assert found["accuracy-local"] == found["accuracy-before"] >= found["accuracy-base"]
    elsewhere = harbour | {"state-dir": str(tmp_path / "elsewhere")}
    first = train_request(both.request(1, evaluate=True), elsewhere).metrics
    assert first["loss-before"] == found["loss-base"]
    # Asking changes nothing of what comes next.
    again = evaluate_request(both.snapshot(version, 3, 3, accepted=3), harbour).metrics
    assert again == found


def test_exact_match_is_counted_where_it_is_asked_for(harbour: dict[str, Any]) -> None:
    desk = AdapterDesk(**{"local-baseline": True, "exact-match": 3})
    reply = go_on(desk, harbour, 1)
    found = evaluate_request(desk.snapshot(update(reply), 1, 1, accepted=1), harbour).metrics
    for when in ("base", "local", "before"):
        assert found[f"exact-asked-{when}"] == 3 and 0 <= found[f"exact-match-{when}"] <= 1


def test_lost_state_ends_the_figures_not_the_federation(
    both: AdapterDesk, harbour: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    version = update(train_request(both.request(1), harbour))
    shutil.rmtree(folder_of(harbour) / "gen-000001")
    with caplog.at_level(logging.WARNING):
        reply = train_request(both.snapshot(version, 1, 2), harbour)
    assert "no local-only figures" in caplog.text
    reply = train_request(both.snapshot(update(reply), 2, 3), harbour)
    found = evaluate_request(both.snapshot(update(reply), 3, 3, accepted=3), harbour).metrics
    assert "loss-base" in found and "loss-local" not in found


def test_training_alone_that_fails_costs_its_figures_only(
    both: AdapterDesk,
    harbour: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fails(*_: Any) -> None:
        raise TrainingError("the loss is not finite")

    monkeypatch.setattr(alone, "_trained", fails)
    reply = train_request(both.request(1), harbour)
    assert reply.status == "done" and "cannot train alone" in caplog.text
    again = train_request(both.request(1), harbour)
    assert blobs(again) == blobs(reply) and caplog.text.count("cannot train alone") == 1


def test_a_generation_of_before_is_still_read(lora: AdapterDesk, harbour: dict[str, Any]) -> None:
    """A folder without the newer file is whole."""
    go_on(lora, harbour, 1)
    files = {path.name for path in (Path(folder_of(harbour)) / "gen-000001").iterdir()}
    assert files == {
        "inner.safetensors", "residual.safetensors", "personal.safetensors", "reply.safetensors",
        "state.json",
    }  # fmt: skip
    assert state_of(harbour).load(1) is not None
