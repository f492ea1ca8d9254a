from __future__ import annotations

import json
import logging
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flower_geo.data import PackedCorpus, cache
from flower_geo.data.cache import open_or_build
from flower_geo.errors import DataError

Pack = Callable[..., PackedCorpus]
DTYPE = np.dtype("<u2")


def builder(folder: Path) -> str:
    np.arange(1000, dtype=DTYPE).tofile(folder / "train.bin")
    np.arange(1000, 1100, dtype=DTYPE).tofile(folder / "held_out.bin")
    return "test"


def never(folder: Path) -> str:
    raise AssertionError("a good entry was built anew")


def test_an_entry_is_built_once_and_mapped(tmp_path: Path) -> None:
    open_or_build(tmp_path / "c", "k", DTYPE, builder)
    found = open_or_build(tmp_path / "c", "k", DTYPE, never)
    assert isinstance(found.train, np.memmap) and not found.train.flags.writeable
    assert found.train[-1] == 999 and found.held_out.tolist() == list(range(1000, 1100))
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["k"]


def test_tokens_are_private_to_the_user(tmp_path: Path) -> None:
    open_or_build(tmp_path / "c", "k", DTYPE, builder)
    assert (tmp_path / "c").stat().st_mode & 0o077 == 0
    assert (tmp_path / "c" / "k").stat().st_mode & 0o077 == 0


def truncate(path: Path, to: int) -> None:
    with path.open("r+b") as handle:
        handle.truncate(to)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes), "utf-8")


FAULTS: dict[str, Callable[[Path], object]] = {
    "train short by a token": lambda e: truncate(e / "train.bin", 1998),
    "train short by a byte": lambda e: truncate(e / "train.bin", 1999),
    "train empty": lambda e: truncate(e / "train.bin", 0),
    "train longer": lambda e: (e / "train.bin").open("ab").write(b"xx") and None,
    "a bit of held-out": lambda e: flip(e / "held_out.bin"),
    "held-out gone": lambda e: (e / "held_out.bin").unlink(),
    "meta gone": lambda e: (e / "meta.json").unlink(),
    "meta cut": lambda e: truncate(e / "meta.json", 40),
    "meta no object": lambda e: (e / "meta.json").write_text("[1]"),
    "meta binary": lambda e: (e / "meta.json").write_bytes(b"\xff\xfe\x00"),
    "meta without counts": lambda e: edit(e / "meta.json", train=None),
    "another version": lambda e: edit(e / "meta.json", version=0),
    "another dtype": lambda e: edit(e / "meta.json", dtype="<u4"),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("fault", FAULTS)
def test_a_damaged_entry_is_rebuilt_with_a_warning(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    open_or_build(tmp_path, "k", DTYPE, builder)
    FAULTS[fault](tmp_path / "k")
    with caplog.at_level(logging.WARNING):
        found = open_or_build(tmp_path, "k", DTYPE, builder)
    assert "building it anew" in caplog.text and str(tmp_path / "k") in caplog.text
    assert found.train.tolist() == list(range(1000))
    open_or_build(tmp_path, "k", DTYPE, never)
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_a_file_in_the_entry_s_place_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "k").write_text("?", "utf-8")
    assert open_or_build(tmp_path, "k", DTYPE, builder).train.size == 1000


def test_a_reader_keeps_its_tokens_when_the_entry_is_replaced(tmp_path: Path) -> None:
    found = open_or_build(tmp_path, "k", DTYPE, builder)
    (tmp_path / "k" / "meta.json").unlink()
    open_or_build(tmp_path, "k", DTYPE, builder)
    assert found.train.tolist() == list(range(1000))


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def failing(folder: Path) -> str:
        builder(folder)
        raise DataError("no")

    with pytest.raises(DataError, match="no"):
        open_or_build(tmp_path, "k", DTYPE, failing)
    assert not list(tmp_path.iterdir())


def test_what_killed_builds_left_is_swept_in_time(tmp_path: Path) -> None:
    for name, age in ((".tmp-old", 2 * 86400), (".tmp-new", 60)):
        (tmp_path / name).mkdir()
        then = time.time() - age
        os.utime(tmp_path / name, (then, then))
    open_or_build(tmp_path, "k", DTYPE, builder)
    assert {path.name for path in tmp_path.iterdir()} == {"k", ".tmp-new"}


def test_an_unwritable_folder_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "c").write_text("a file", "utf-8")
    with pytest.raises(DataError, match="cannot write the data cache") as caught:
        open_or_build(tmp_path / "c", "k", DTYPE, builder)
    assert "\n" not in str(caught.value) and "writable folder" in str(caught.value)


def test_a_disk_that_keeps_nothing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_open", lambda entry, dtype: None)
    with pytest.raises(DataError, match="does not keep what is written"):
        open_or_build(tmp_path, "k", DTYPE, builder)


def test_the_first_to_finish_wins(tmp_path: Path) -> None:
    def overtaken(folder: Path) -> str:
        open_or_build(tmp_path, "k", DTYPE, builder)
        (tmp_path / "k" / "mark").touch()
        return builder(folder)

    open_or_build(tmp_path, "k", DTYPE, overtaken)
    assert (tmp_path / "k" / "mark").exists()


def _worker(folder: str, start: Any, results: Any) -> None:
    start.wait()
    good = True
    for _ in range(10):
        found = open_or_build(Path(folder), "k", DTYPE, builder)
        good &= found.train.tolist() == list(range(1000))
        # Damage it for the others as well.
        (Path(folder) / "k" / "meta.json").unlink(missing_ok=True)
    results.put(good)


def test_processes_that_prepare_and_spoil_one_entry_all_succeed(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    start, results = context.Event(), context.Queue()
    workers = [
        context.Process(target=_worker, args=(str(tmp_path), start, results)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    start.set()
    try:
        assert [results.get(timeout=60) for _ in workers] == [True] * 3
    finally:
        for worker in workers:
            worker.join(timeout=10)
            assert worker.exitcode == 0


def test_prepared_text_is_not_read_again(pack: Pack, folder: Path, tmp_path: Path) -> None:
    first = pack(folder)
    entries = list((tmp_path / "cache").iterdir())
    assert pack(folder).fingerprint == first.fingerprint
    assert list((tmp_path / "cache").iterdir()) == entries
    (folder / "01.txt").write_text("changed words here", "utf-8")
    assert pack(folder).fingerprint != first.fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 2
