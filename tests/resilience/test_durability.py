"""Disks that fill, files that change: what was committed stays, and the rest is said in a line."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.durable import write_tensors
from flower_geo.errors import StateError
from flower_geo.resilience import BackgroundWriter, CheckpointStore, Journal, Spool, checkpoint
from flower_geo.resilience.spool import ReplyMeta

GROUPS = ("master", "shadow", "outer", "deltas")


def tensors(value: float) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {"w": torch.full((64, 64), value + n)} for n, name in enumerate(GROUPS)}


def stored(folder: Path, rounds: int = 3) -> CheckpointStore:
    store = CheckpointStore(folder / "checkpoints")
    for round in range(1, rounds + 1):
        store.save(round, tensors(round), {"n": round})
    return store


# -- files that changed -----------------------------------------------------------


@pytest.mark.parametrize("name", [*(f"{group}.safetensors" for group in GROUPS), "state.json"])
@pytest.mark.parametrize("damage", ["bit", "last bit", "cut", "longer", "empty", "gone", "folder"])
def test_whatever_file_of_the_newest_is_damaged_the_one_before_is_used(
    tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = stored(tmp_path)
    file = store.path(3) / name
    data = bytearray(file.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 0x10
    elif damage == "last bit":
        data[-2] ^= 1  # the last byte of the state is a line's end
    elif damage == "cut":
        data = data[: len(data) * 2 // 3]
    elif damage == "longer":
        data += b"x"
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "gone":
        file.write_bytes(b"" if damage == "empty" else bytes(data))
    with caplog.at_level(logging.WARNING):
        newest = store.newest()
    assert newest is not None and newest.round == 2 and newest.state == {"n": 2}
    assert torch.equal(newest.tensors["outer"]["w"], torch.full((64, 64), 4.0))
    (warning,) = caplog.messages
    assert "checkpoint of round 3 skipped" in warning and "\n" not in warning
    # The damaged one is out of the way, and the next commit of that round goes through.
    store.save(3, tensors(9), {"n": 9})
    again = store.newest()
    assert again is not None and again.state == {"n": 9}


def test_two_damaged_ones_in_a_row(tmp_path: Path) -> None:
    store = stored(tmp_path)
    (store.path(3) / "state.json").write_text("{")
    (store.path(2) / "outer.safetensors").unlink()
    newest = store.newest()
    assert newest is not None and newest.round == 1


# -- disks that fill --------------------------------------------------------------


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("where", ["write_tensors", "write_sealed"])
def test_a_full_disk_leaves_the_last_one_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = stored(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, where, full)
        with pytest.raises(StateError, match="No space left on device; free space") as caught:
            store.save(4, tensors(4), {"n": 4})
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in store.folder.iterdir()) == [f"round-00000{n}" for n in (1, 2, 3)]
    newest = store.newest()
    assert newest is not None and newest.round == 3


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)]
    try:
        done = subprocess.run(command, capture_output=True, check=False)
    except OSError as error:
        pytest.skip(f"no mount here: {error}")
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path) -> None:
    store = stored(small_disk)  # three times 64 KiB
    journal, spool = Journal(small_disk / "journal.jsonl"), Spool(small_disk / "spool")
    journal.append({"what": "commit", "round": 3})
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
        while True:
            file.write(b"x" * 4096)
    meta = ReplyMeta("a", 4, 3, "h", "delta", 1.0, "f", "p")
    with pytest.raises(StateError, match="No space left"):
        store.save(4, tensors(4), {"n": 4})
    with pytest.raises(StateError, match="No space left"):
        spool.put(4, meta, {"w": b"x" * 100_000})
    newest = store.newest()
    assert newest is not None and newest.round == 3 and spool.replies(4) == []
    filler.unlink()
    assert store.save(4, tensors(4), {"n": 4}).is_dir()
    journal.append({"what": "commit", "round": 4})
    assert Journal(journal.path).last_round() == 4


# -- the background writer --------------------------------------------------------


def test_at_most_one_behind_and_never_half_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = stored(tmp_path, 1), BackgroundWriter()
    go, writing = threading.Event(), threading.Event()
    write = write_tensors

    def slow(path: Path, values: Any) -> str:
        writing.set()
        assert go.wait(10)
        return write(path, values)

    monkeypatch.setattr(checkpoint, "write_tensors", slow)

    def commit() -> None:
        store.save(2, tensors(2), {"n": 2})

    writer.submit(commit)
    assert writing.wait(10)
    assert store.rounds() == [1]  # half written is not there at all
    begun: list[float] = []
    threading.Timer(0.2, go.set).start()
    before = time.monotonic()
    writer.submit(lambda: begun.append(time.monotonic()))
    assert time.monotonic() - before >= 0.15 and store.rounds() == [1, 2]
    writer.wait()
    assert len(begun) == 1


# -- the journal ------------------------------------------------------------------


def written(tmp_path: Path) -> Path:
    journal = Journal(tmp_path / "journal.jsonl")
    for round in (1, 2, 3):
        journal.append({"what": "commit", "round": round})
    return journal.path


@pytest.mark.parametrize(
    "line", [b"[1]", b"5", b"null", b"\xff\xfe", b"[" * 100_000, b'{"this": 5}', b"{}", b"x"]
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: bytes) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([lines[0], line, *lines[2:]]) + b"\n")
    for read in (Journal(path).entries, Journal(path).last_round):
        with pytest.raises(StateError, match=r"line 2 .*restore it .*or move it away"):
            read()
    with pytest.raises(StateError, match="line 2"):
        Journal(path).append({"what": "commit", "round": 4})


def test_a_journal_that_cannot_be_read_at_all(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").mkdir()
    with pytest.raises(StateError, match="cannot read"):
        Journal(tmp_path / "journal.jsonl").entries()


def test_lines_cut_off_at_the_end_are_no_damage(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for cut in range(1, len(whole), 7):
        path.write_bytes(whole[:-cut])
        last = Journal(path).last_round()
        assert 0 <= last <= 3
        Journal(path).append({"what": "commit", "round": last + 1})
        assert Journal(path).last_round() == last + 1
        path.write_bytes(whole)
