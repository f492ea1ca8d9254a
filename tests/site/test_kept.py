"""Data is opened once a process, and anew when its files change."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from flower_geo.site.tasks.kept import KeptByFiles, file_stamps


def test_it_is_made_once_while_everything_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    kept, made = KeptByFiles[int](), itertools.count()

    def get(*deciding: object) -> int:
        return kept.get(deciding, lambda: file_stamps([path]), lambda: next(made))

    assert [get("x"), get("x"), get("y"), get("x")] == [0, 0, 1, 0]
    path.write_text("another")
    assert [get("x"), get("x")] == [2, 2]
    monkeypatch.chdir(tmp_path)  # a relative path means another file there
    assert get("x") == 3
    path.unlink()
    assert [get("x"), get("x")] == [4, 5]


def test_a_file_written_to_meanwhile_is_not_kept(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("one")
    kept, made = KeptByFiles[int](), itertools.count()

    def make() -> int:
        number = next(made)
        if number == 0:
            path.write_text("while it is read")
        return number

    found = [kept.get((), lambda: file_stamps([path]), make) for _ in range(3)]
    assert found == [0, 1, 1]


def test_the_oldest_go_first(tmp_path: Path) -> None:
    kept, made = KeptByFiles[int](), itertools.count()

    def get(number: int) -> int:
        return kept.get((number,), lambda: (), lambda: next(made))

    assert [get(number) for number in range(9)] == list(range(9))
    assert get(8) == 8 and get(1) == 1 and get(0) == 9


def test_a_replaced_file_of_the_same_size_and_time_is_another(tmp_path: Path) -> None:
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("one")
    other.write_text("two")
    times = path.stat().st_mtime_ns
    before = file_stamps([path])
    os.utime(other, ns=(times, times))
    other.replace(path)
    assert file_stamps([path]) != before
    assert file_stamps([path, tmp_path / "none"]) is None
