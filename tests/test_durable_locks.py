"""Locks die with their owner, and nobody but the owner holds them."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import IO

import pytest

from flower_geo.durable import (
    FileLock,
)
from flower_geo.errors import StateError, StateLocked


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


HOLDER = """
    import os, sys, time
    from pathlib import Path
    from flower_geo.durable import FileLock
    lock = FileLock(Path(sys.argv[1]))
    lock.acquire("it")
    child = 0
    if sys.argv[2] == "fork":
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    print(child, flush=True)
    time.sleep(60)
"""


def holder(path: Path, kind: str = "plain") -> tuple[subprocess.Popen[str], int]:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(HOLDER), str(path), kind],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    out: IO[str] | None = process.stdout
    assert out is not None
    with out:
        return process, int(out.readline())


def test_a_lock_of_a_living_process_is_refused_and_of_a_killed_one_free(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    process, child = holder(path, "fork")
    try:
        with pytest.raises(StateLocked, match=rf"site 'x' is in use by process {process.pid} "):
            FileLock(path).acquire("site 'x'")
    finally:
        process.kill()
        process.wait()
    try:
        # Its forked child lives on, as a worker of a data loader might.
        os.kill(child, 0)
        lock = FileLock(path)
        lock.acquire("site 'x'")
        assert path.read_text() == f"{os.getpid()}\n" and mode(path) == 0o600
        lock.release()
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_lock_is_exclusive_within_a_process_and_given_back_once(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    first.acquire("it")
    with pytest.raises(StateLocked, match=str(os.getpid())):
        second.acquire("it")
    second.release()
    with pytest.raises(StateLocked):
        FileLock(tmp_path / "lock").acquire("it")
    first.release()
    first.release()
    second.acquire("it")
    second.release()


FORKED = """
    import os, sys
    from pathlib import Path
    from flower_geo.durable import FileLock, StateLocked
    def free():
        try:
            other = FileLock(Path(sys.argv[1]))
            other.acquire("it")
            other.release()
            return True
        except StateLocked:
            return False
    lock = FileLock(Path(sys.argv[1]))
    lock.acquire("it")
    stay, tell = os.pipe(), os.pipe()
    if os.fork() == 0:
        lock.release()
        os.write(tell[1], b"free" if free() else b"held")
        os.read(stay[0], 1)
        os._exit(0)
    assert os.read(tell[0], 4) == b"held", "the child broke the lock"
    assert not free()
    lock.release()
    assert free(), "the child holds the lock"
    os.write(stay[1], b"x")
    os.wait()
"""


def test_a_forked_child_neither_holds_nor_breaks_its_parents_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(FORKED), str(tmp_path / "lock")]
    subprocess.run(command, check=True)


def test_a_started_program_does_not_inherit_the_lock(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    lock.acquire("it")
    sleeper = subprocess.Popen(["sleep", "60"], close_fds=False)
    try:
        lock.release()
        other = FileLock(tmp_path / "lock")
        other.acquire("it")
        other.release()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_a_full_disk_does_not_cost_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    lock = FileLock(tmp_path / "lock")
    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        lock.acquire("it")
    with pytest.raises(StateLocked):
        FileLock(tmp_path / "lock").acquire("it")
    lock.release()


def test_a_file_system_without_locks_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(StateError, match="No locks available") as caught:
        FileLock(tmp_path / "lock").acquire("it")
    assert not isinstance(caught.value, StateLocked)
