"""Snapshots within a round: whose they are, when they are due, and that no bit is lost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from flower_geo import durable
from flower_geo.errors import StateError
from flower_geo.site import inround
from flower_geo.site.inround import Pace, RoundSnapshot, RoundSnapshots, label_of
from flower_geo.site.watch import Leaving, Watch
from flower_geo.site.work import train_request
from flower_geo.training import RoundSoFar
from tests.site.requests import Desk, blobs, folder_of, state_of

STEPS = 6


class Impatient(Watch):
    """Asks to end after the n-th step it sees."""

    def __init__(self, after: int) -> None:
        self.after, self.seen = after, 0
        self.kept: list[int] = []

    def step(self, done: int, of: int | None, loss: torch.Tensor) -> None:
        self.seen += 1
        assert of in (STEPS, None) and loss.ndim == 0

    def stored(self, steps: int) -> None:
        self.kept.append(steps)

    def leaving(self) -> bool:
        return self.seen >= self.after


@pytest.fixture(scope="module")
def longer() -> Desk:
    return Desk(**{"inner-steps": STEPS})


def broken_off(desk: Desk, node: dict[str, Any], after: int, **values: Any) -> Impatient:
    watch = Impatient(after)
    with pytest.raises(Leaving):
        train_request(desk.request(**values), node, watch)
    assert (folder_of(node) / "snapshot" / "snapshot.json").stat().st_mode & 0o077 == 0
    return watch


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if not key.startswith("seconds")}


def test_a_round_broken_off_twice_ends_with_the_same_bits(
    longer: Desk, north: dict[str, Any], tmp_path: Any
) -> None:
    inside = {**north, "state-dir": str(tmp_path / "undisturbed")}
    for round in (1, 2):
        given: dict[str, Any] = {"round": round, "accepted": round - 1, "evaluate": round == 1}
        reference = train_request(longer.request(**given), inside)
        assert broken_off(longer, north, 2, **given).kept == [2]
        assert broken_off(longer, north, 3, **given).kept == [5]
        torch.manual_seed(round)
        watch = Impatient(99)
        reply = train_request(longer.request(**given), north, watch)
        assert watch.seen == 1
        assert blobs(reply) == blobs(reference)
        assert numbers(reply.metrics) == numbers(reference.metrics)
        mine, theirs = (state_of(node).load(round) for node in (north, inside))
        assert mine and theirs and mine.consumed == theirs.consumed
        for part in ("inner", "residual"):
            one, other = getattr(mine, part), getattr(theirs, part)
            assert one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
        assert not (folder_of(north) / "snapshot").exists()


@pytest.mark.parametrize(
    "changed",
    [{"round": 2}, {"fingerprint": "x"}, {"evaluate": True}, {"position": 3.0}, {"consumed": 4,
     "accepted": 1}],
)  # fmt: skip
def test_a_snapshot_is_its_own_rounds_only(
    longer: Desk, north: dict[str, Any], changed: dict[str, Any]
) -> None:
    broken_off(longer, north, 4)
    watch = Impatient(99)
    train_request(longer.request(**{"round": 1, **changed}), north, watch)
    assert watch.seen == STEPS


def test_another_batch_size_of_the_site_starts_the_round_anew(
    longer: Desk, north: dict[str, Any]
) -> None:
    broken_off(longer, north, 4)
    watch = Impatient(99)
    train_request(longer.request(1), {**north, "batch-size": 3}, watch)
    assert watch.seen == STEPS


@pytest.mark.parametrize("file", ["weights.safetensors", "inner.safetensors", "snapshot.json"])
def test_a_damaged_snapshot_starts_the_round_anew(
    longer: Desk, north: dict[str, Any], file: str
) -> None:
    broken_off(longer, north, 4)
    path = folder_of(north) / "snapshot" / file
    data = path.read_bytes()
    path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    watch = Impatient(99)
    assert train_request(longer.request(1), north, watch).metrics["steps"] == STEPS
    assert watch.seen == STEPS


def test_rounds_by_time_count_the_time_before(longer: Desk, north: dict[str, Any]) -> None:
    own = {**north, "inner-seconds": 0.4}
    broken_off(longer, own, 2)
    reply = train_request(longer.request(1), own)
    assert reply.metrics["consumed"] == 2 * reply.metrics["steps"]
    assert 0.4 <= reply.metrics["seconds"] < 1.5


def test_snapshots_are_taken_at_their_steps_where_time_allows(
    longer: Desk, north: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inround, "_SHARE", 1e9)
    for own, steps in (({}, []), ({"snapshot-steps": 2}, [2, 4]), ({"snapshot-steps": 0}, [])):
        watch = Impatient(99)
        state = north["state-dir"] + str(own)
        train_request(longer.request(1), {**north, **own, "state-dir": state}, watch)
        assert watch.kept == steps


def test_a_disk_that_takes_no_snapshot_costs_no_round(
    longer: Desk, north: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(inround, "_SHARE", 1e9)

    def full(*_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inround, "write_tensors", full)
    watch = Impatient(99)
    reply = train_request(longer.request(1), {**north, "snapshot-steps": 1}, watch)
    assert reply.status == "done" and watch.kept == []
    assert "no snapshot within the round: cannot write" in caplog.text
    durable.remove_unfinished(folder_of(north))


def test_the_pace(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    pace = Pace(10, nbytes=0)
    now[0] += 1
    assert [step for step in range(1, 31) if pace.due(step)] == [10, 20, 30]
    assert not any(Pace(0, 0).due(step) for step in range(1, 31))
    now[0] += 2
    pace.wrote(now[0] - 2)  # took two seconds: the next after forty
    for later, due in ((39, False), (2, True)):
        now[0] += later
        assert pace.due(10) is due
    pace.wrote(now[0] - 1000)
    for later, due in ((299, False), (2, True)):  # however long one takes
        now[0] += later
        assert pace.due(10) is due


def test_labels_and_files(tmp_path: Any) -> None:
    assert label_of(1, "a") == label_of(1, "a") != label_of(1, "b")
    so_far = RoundSoFar(3, 90, 1.5, 4.1, 3.9, 12.3, 0.7)
    kept = RoundSnapshot(so_far, 12, {"w": torch.ones(2)}, {"rng/cpu": torch.zeros(3)}, {"m": 0.1})
    mine = RoundSnapshots(tmp_path, "mine")
    assert mine.load() is None
    assert mine.save(replace(kept, consumed=1)) and mine.save(kept)
    found = mine.load()
    assert found is not None and (found.so_far, found.consumed) == (so_far, 12)
    assert torch.equal(found.weights["w"], torch.ones(2)) and found.metrics == {"m": 0.1}
    assert RoundSnapshots(tmp_path, "theirs").load() is None
    mine.drop()
    assert list(tmp_path.iterdir()) == []


def test_two_are_kept_and_gone_back_to(tmp_path: Any) -> None:
    mine = RoundSnapshots(tmp_path, "mine", keep=2)

    def after(step: int) -> RoundSnapshot:
        so_far = RoundSoFar(step, 90, 1.5, 4.1, 3.9, 12.3, 0.7)
        return RoundSnapshot(so_far, step, {"w": torch.full((2,), float(step))}, {}, {})

    for step in (2, 4, 6):
        assert mine.save(after(step))
    assert mine.steps() == [6, 4] and mine.load(2) is None
    newest, before = mine.load(), mine.load(4)
    assert newest is not None and newest.consumed == 6
    assert before is not None and torch.equal(before.weights["w"], torch.full((2,), 4.0))
    found = mine.back_to(4)
    assert found is not None and found.consumed == 4 and mine.steps() == [4]
    assert mine.save(after(6)) and mine.steps() == [6, 4]
    with pytest.raises(StateError, match="cannot go back to step 5"):
        mine.back_to(5)
    assert mine.back_to(0) is None and mine.steps() == []
    mine.save(after(2)), mine.save(after(4))
    mine.drop()
    assert list(tmp_path.iterdir()) == []
