"""Snapshots of the cloud's half: kept by round, the newest two, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import torch

from flower_geo.cloud.store import HalfStore


def test_the_newest_two_are_kept_and_read_again(tmp_path: Path) -> None:
    store = HalfStore(tmp_path, "one")
    assert store.steps() == [] and store.load(10) is None
    for step in (10, 20, 30):
        assert store.save(step, {"w": torch.full((3,), float(step))}, {"lanes": {"a": step}})
    assert HalfStore(tmp_path, "one").steps() == [30, 20]
    found = HalfStore(tmp_path, "one").load(20)
    assert found is not None and found[0]["w"].tolist() == [20.0] * 3
    assert found[1] == {"lanes": {"a": 20}} and store.load(10) is None


def test_going_back_drops_what_came_later(tmp_path: Path) -> None:
    store = HalfStore(tmp_path, "one")
    for step in (10, 20):
        store.save(step, {}, {})
    store.back_to(10)
    assert store.steps() == [10]
    store.save(20, {"w": torch.ones(1)}, {})
    store.back_to(0)
    assert store.steps() == []


def test_a_round_has_its_own_and_others_can_be_dropped(tmp_path: Path) -> None:
    for label in ("one", "two", "three"):
        HalfStore(tmp_path, label).save(5, {}, {})
    assert HalfStore(tmp_path, "four").steps() == []
    HalfStore(tmp_path, "two").drop_others("three")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["three", "two"]


def test_a_damaged_one_counts_as_none(tmp_path: Path) -> None:
    store = HalfStore(tmp_path, "one")
    store.save(5, {"w": torch.ones(4)}, {})
    path = tmp_path / "one" / "step-000005" / "half.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert store.load(5) is None
    (tmp_path / "one" / "step-000005" / "step.json").unlink()
    assert store.load(5) is None
