"""Checkpoints: whole or absent, verified, the one before used when damaged."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from flower_geo.errors import CheckpointCorrupt, StateError
from flower_geo.resilience.checkpoint import BackgroundWriter, CheckpointStore


def group(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.full((4, 3), value), "b": torch.tensor(value)}


def store_with(tmp_path: Path, rounds: int, keep: int = 3) -> CheckpointStore:
    store = CheckpointStore(tmp_path / "checkpoints", keep)
    for round in range(rounds + 1):
        master = group(float(round))
        store.save(round, {"master": master, "shadow": master, "outer": {}}, {"n": round})
    return store


def test_round_trip_and_retention(tmp_path: Path) -> None:
    store = store_with(tmp_path, 5)
    assert store.rounds() == [3, 4, 5]
    newest = store.newest()
    assert newest is not None and newest.round == 5 and newest.state == {"n": 5}
    assert torch.equal(newest.tensors["master"]["w"], torch.full((4, 3), 5.0))
    assert newest.tensors["outer"] == {}
    assert [p.name for p in (tmp_path / "checkpoints").iterdir() if p.name.startswith(".")] == []


def test_equal_groups_are_stored_once(tmp_path: Path) -> None:
    folder = store_with(tmp_path, 1).path(1)
    names = ("master.safetensors", "shadow.safetensors")
    inodes = {(folder / name).stat().st_ino for name in names}
    assert len(inodes) == 1


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "state", "empty"])
def test_a_damaged_newest_is_skipped_with_a_warning(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = store_with(tmp_path, 3)
    file = store.path(3) / ("state.json" if damage == "state" else "outer.safetensors")
    data = file.read_bytes()
    if damage == "bit":
        file.write_bytes(data[:5] + bytes([data[5] ^ 1]) + data[6:])
    elif damage in ("cut", "state"):
        file.write_bytes(data[: len(data) // 2])
    elif damage == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
    with caplog.at_level(logging.WARNING):
        newest = store.newest()
    assert newest is not None and newest.round == 2
    assert "round 3" in caplog.text
    assert store.rounds() == [1, 2]


def test_all_damaged_gives_none(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    for round in store.rounds():
        (store.path(round) / "state.json").write_text("{}")
    assert store.newest() is None


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    store = store_with(tmp_path, 0)
    state = store.path(0) / "state.json"
    state.write_text(state.read_text().replace("outer.safetensors", "../../x.safetensors"))
    with pytest.raises(CheckpointCorrupt):
        store.load(0)


def test_a_failed_save_leaves_the_last_one(tmp_path: Path) -> None:
    store = store_with(tmp_path, 1)
    # Root may write into read-only folders, so a file stands in the way instead.
    (store.folder / "round-000002").write_text("in the way")
    blocked = CheckpointStore(store.folder / "round-000002" / "below")
    with pytest.raises(StateError, match="cannot write"):
        blocked.save(2, {"master": group(2.0)}, {})
    (store.folder / "round-000002").unlink()
    newest = store.newest()
    assert newest is not None and newest.round == 1


def test_background_errors_reach_the_caller() -> None:
    writer = BackgroundWriter()

    def full() -> None:
        raise StateError("disk full")

    writer.submit(full)
    with pytest.raises(StateError, match="disk full"):
        writer.wait()
    seen: list[int] = []
    writer.submit(lambda: seen.append(1))
    writer.wait()
    assert seen == [1]
