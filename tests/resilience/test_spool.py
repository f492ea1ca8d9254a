"""Replies on disk: in site order, whole or not at all, read when asked for."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace
from pathlib import Path

import pytest

from flower_geo.errors import CheckpointCorrupt, StateError
from flower_geo.resilience.spool import ReplyMeta, Spool

META = ReplyMeta(
    site="a", round=3, version=2, base_hash="h", kind="delta", weight=8.0, fingerprint="f",
    payload_hash="p", metrics={"tokens": 8.0},
)  # fmt: skip
BLOBS = {"w": b"\x00\x01\x02" * 50, "one": b"\xff"}


def put(spool: Spool, site: str, **values: object) -> None:
    spool.put(3, replace(META, site=site, **values), BLOBS)  # type: ignore[arg-type]


def sites(spool: Spool) -> list[str]:
    return [reply.meta.site for reply in spool.replies(3)]


@pytest.mark.parametrize("order", list(itertools.permutations(["a", "b", "B-2", "z.9"]))[::5])
def test_site_order_whatever_the_arrival(tmp_path: Path, order: tuple[str, ...]) -> None:
    spool = Spool(tmp_path)
    for site in order:
        put(spool, site)
    assert sites(spool) == sorted(order)
    assert sites(Spool(tmp_path)) == sorted(order)


def test_what_was_put_comes_back(tmp_path: Path) -> None:
    stored = Spool(tmp_path).put(3, META, BLOBS)
    (found,) = Spool(tmp_path).replies(3)
    assert found.meta == stored.meta == META and found.kind == "delta"
    assert {name: found.blob(name) for name in found.names()} == BLOBS
    assert Spool(tmp_path).replies(4) == [] and Spool(tmp_path / "none").replies(3) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and all(path.stat().st_mode & 0o077 == 0 for path in files)
    assert Spool(tmp_path).size(3) > sum(len(blob) for blob in BLOBS.values())


@pytest.mark.parametrize(("discount", "weight"), [(1.0, 8.0), (0.5, 4.0), (0.25, 2.0)])
def test_late_replies_weigh_less(tmp_path: Path, discount: float, weight: float) -> None:
    put(Spool(tmp_path), "a", staleness=1, discount=discount)
    (found,) = Spool(tmp_path).replies(3)
    assert found.weight == weight and found.meta.weight == 8.0


def test_a_second_reply_of_a_site_replaces_the_first(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    put(spool, "a")
    spool.put(3, replace(META, weight=9.0), {"w": b"new"})
    for seen in (spool, Spool(tmp_path)):
        (found,) = seen.replies(3)
        assert found.weight == 9.0 and found.names() == ["w"] and found.blob("w") == b"new"


@pytest.mark.parametrize(
    "damage", ["blob bit", "blob cut", "blob gone", "meta bit", "meta cut", "meta gone", "renamed"]
)
def test_a_damaged_reply_is_dropped_so_that_the_site_is_asked_again(
    tmp_path: Path, damage: str
) -> None:
    for site in ("a", "b"):
        put(Spool(tmp_path), site)
    folder = tmp_path / "round-000003" / "a"
    file = folder / ("blobs.safetensors" if "blob" in damage else "reply.json")
    data = file.read_bytes()
    if damage == "renamed":
        os.rename(folder, folder.with_name("c"))
    elif "gone" in damage:
        file.unlink()
    elif "cut" in damage:
        file.write_bytes(data[:-20])
    else:
        # A digit within the weight, or the last byte of the tensors.
        place = data.index(b"8.0") if "meta" in damage else len(data) - 1
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    spool = Spool(tmp_path)
    assert sites(spool) == ["b"]
    assert [entry.name for entry in folder.parent.iterdir()] == ["b"]
    put(spool, "a")
    assert sites(spool) == ["a", "b"]


def test_half_written_replies_are_not_seen(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    put(spool, "a")
    os.rename(tmp_path / "round-000003" / "a", tmp_path / "round-000003" / ".a.abcdefgh")
    (tmp_path / "round-000003" / "stray-file").write_text("x")
    assert sites(spool) == [] and not spool.holds(3, "a")


def test_blobs_are_read_when_asked_for(tmp_path: Path) -> None:
    put(Spool(tmp_path), "a")
    spool = Spool(tmp_path)
    (reply,) = spool.replies(3)
    assert spool.holds(3, "a") and not spool.holds(3, "b")
    spool.drop(3, "a")
    with pytest.raises(CheckpointCorrupt):
        reply.blob("w")
    assert spool.replies(3) == [] and not spool.holds(3, "a")
    spool.drop(3, "a")


def test_clear_takes_rounds_up_to_and_no_more(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for round in (1, 2, 3, 1_000_000):
        spool.put(round, META, BLOBS)
    (tmp_path / "round-x").mkdir()
    spool.clear(2)
    left = ["round-000003", "round-1000000", "round-x"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == left
    Spool(tmp_path / "none").clear(5)


def test_a_disk_that_takes_nothing(tmp_path: Path) -> None:
    (tmp_path / "round-000003").write_text("in the way")
    with pytest.raises(StateError, match="cannot write"):
        put(Spool(tmp_path), "a")
