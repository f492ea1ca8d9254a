"""Writes are whole or absent, locks die with their owner, and nobody else can read."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_geo import durable
from flower_geo.durable import (
    FileLock,
    atomic_folder,
    read_json,
    read_sealed,
    read_tensors,
    remove_unfinished,
    write_bytes,
    write_json,
    write_sealed,
    write_tensors,
)
from flower_geo.errors import CheckpointCorrupt, StateError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def open_umask() -> Iterator[None]:
    """Modes must not hang on a careful umask."""
    before = os.umask(0)
    yield
    os.umask(before)


class Dies(BaseException):
    """Stands for a crash: no handler of Exception may catch it."""


# -- files ----------------------------------------------------------------------


def test_bytes_are_replaced_whole_and_private(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "file"
    write_bytes(path, b"one")
    assert mode(path) == 0o600
    path.chmod(0o666)
    write_bytes(path, b"two")
    assert (path.read_bytes(), mode(path)) == (b"two", 0o600)
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, step, full)
        with pytest.raises(StateError, match=r"cannot write .*No space left"):
            write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writes: list[Callable[[], object]] = [
        lambda: write_bytes(tmp_path / "file" / "x", b""),
        lambda: write_json(tmp_path / "file" / "x", {}),
        lambda: FileLock(tmp_path / "file" / "x").acquire("it"),
    ]
    for write in writes:
        with pytest.raises(StateError):
            write()
    with pytest.raises(StateError), atomic_folder(tmp_path / "file" / "x"):
        raise AssertionError("not reached")


@given(st.binary(max_size=60))
def test_json_reading_never_raises_anything_else(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(data)
    for read in (read_json, read_sealed):
        try:
            read(path)
        except CheckpointCorrupt:
            pass


def test_json_nested_too_deep(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"[" * 200_000)
    with pytest.raises(CheckpointCorrupt):
        read_json(tmp_path / "x")


def test_a_seal_breaks_at_any_changed_byte(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    value = {"consumed": 1234, "deep": {"list": [1.5, None, "é"]}, "nan": 1e-300}
    write_sealed(path, value)
    assert read_sealed(path) == value and mode(path) == 0o600
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = read_sealed(path)
        except CheckpointCorrupt:
            continue
        assert found == value, f"byte {place}"  # white space between tokens is no content
    for other in (b"[]", b'"x"', b"1", b"{}", b'{"seal": null}', b'{"a": 1}'):
        path.write_bytes(other)
        with pytest.raises(CheckpointCorrupt):
            read_sealed(path)


# -- tensors --------------------------------------------------------------------


def test_tensors_round_trip_and_are_private(tmp_path: Path) -> None:
    given_ = {
        "a": torch.arange(6.0).reshape(2, 3).T, "b": torch.tensor(1), "e": torch.zeros(0, 3),
        "h": torch.ones(3, dtype=torch.bfloat16, requires_grad=True),
    }  # fmt: skip
    digest = write_tensors(tmp_path / "t", given_)
    assert mode(tmp_path / "t") == 0o600 and digest == durable.file_sha256(tmp_path / "t")
    found = read_tensors(tmp_path / "t")
    assert found.keys() == given_.keys()
    for name, tensor in given_.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)
    write_tensors(tmp_path / "none", {})
    assert read_tensors(tmp_path / "none") == {}


def test_damaged_tensor_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t"
    write_tensors(path, {"a": torch.arange(100.0)})
    whole = path.read_bytes()
    for cut in (0, 1, 7, 8, 9, 40, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(CheckpointCorrupt):
            read_tensors(path)
    path.write_bytes((2**63).to_bytes(8, "little") + whole[8:])
    with pytest.raises(CheckpointCorrupt):
        read_tensors(path)
    path.unlink()
    with pytest.raises(CheckpointCorrupt):
        read_tensors(path)
    path.mkdir()
    with pytest.raises(CheckpointCorrupt):
        read_tensors(path)


# -- folders --------------------------------------------------------------------


def filled(target: Path, text: str) -> None:
    with atomic_folder(target) as scratch:
        write_bytes(scratch / "file", text.encode())


def test_a_folder_appears_whole_and_private(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "f") as scratch:
        write_bytes(scratch / "file", b"one")
        assert not (tmp_path / "f").exists()
    filled(tmp_path / "f", "two")
    assert (tmp_path / "f" / "file").read_text() == "two"
    assert mode(tmp_path / "f") == 0o700
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("error", [ValueError, Dies, KeyboardInterrupt])
def test_an_error_inside_leaves_the_old_folder(tmp_path: Path, error: type[BaseException]) -> None:
    filled(tmp_path / "f", "old")
    with pytest.raises(error), atomic_folder(tmp_path / "f") as scratch:
        write_bytes(scratch / "file", b"new")
        raise error
    assert (tmp_path / "f" / "file").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


@pytest.mark.parametrize("failing", [1, 2])
def test_a_rename_that_fails_puts_the_old_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    filled(tmp_path / "f", "old")
    rename, calls = os.replace, []

    def sometimes(source: Path, target: Path) -> None:
        calls.append(source)
        if len(calls) == failing:
            raise OSError(5, "Input/output error")
        rename(source, target)

    with pytest.raises(StateError, match="Input/output"), atomic_folder(tmp_path / "f") as scratch:
        (scratch / "file").write_text("new")
        monkeypatch.setattr(os, "replace", sometimes)
    monkeypatch.undo()
    assert (tmp_path / "f" / "file").read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


WRITER = """
    import os, sys
    from pathlib import Path
    from flower_geo import durable
    rename = os.replace
    for die_at in range(4):
        child = os.fork()
        if child:
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (0 if die_at == 3 else 9)
            continue
        target, seen = Path(sys.argv[1]) / str(die_at) / "f", 0
        def counted(source, to):
            global seen
            if Path(to).parent == target.parent or Path(source) == target:
                seen += 1
                if seen == die_at:
                    os._exit(9)
            rename(source, to)
        os.replace = counted
        with durable.atomic_folder(target) as scratch:
            if die_at == 0:
                os._exit(9)
            durable.write_bytes(scratch / "file", b"new")
        os._exit(0)
"""


def test_a_crash_at_any_moment_leaves_old_or_new(tmp_path: Path) -> None:
    for moment in "0123":
        filled(tmp_path / moment / "f", "old")
        (tmp_path / moment / ".keep").mkdir()
        (tmp_path / moment / ".ipynb_checkpoints").mkdir()
    subprocess.run([sys.executable, "-c", textwrap.dedent(WRITER), str(tmp_path)], check=True)
    assert any(tmp_path.glob("2/.old-f.*/old"))
    for moment in "0123":
        remove_unfinished(tmp_path / moment)
        expected = "new" if moment == "3" else "old"
        assert (tmp_path / moment / "f" / "file").read_text() == expected
        left = {entry.name for entry in (tmp_path / moment).iterdir()}
        assert left == {"f", ".keep", ".ipynb_checkpoints"}


def test_unfinished_work_of_one_name_only(tmp_path: Path) -> None:
    for name in (".model.abcdefgh", ".other.abcdefgh", ".old-model.12345678"):
        (tmp_path / name).mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / ".model.abcdefg1").symlink_to(tmp_path / "outside")
    remove_unfinished(tmp_path, "model")
    assert sorted(e.name for e in tmp_path.iterdir()) == [".other.abcdefgh", "outside"]
    remove_unfinished(tmp_path / "not-there")


def test_json_is_sorted_so_that_equal_values_are_equal_files(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"b": 1, "a": 2})
    write_json(tmp_path / "b", {"a": 2, "b": 1})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert json.loads((tmp_path / "a").read_text()) == {"a": 2, "b": 1}
