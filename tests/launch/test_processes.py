from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flower_geo.errors import StateError
from flower_geo.launch import processes
from flower_geo.launch.processes import MARK, ProcessRef

SLEEP = "import time; time.sleep(60)"

# A parent whose child outlives it, in a session of its own.
FORKS = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark; what carries it is killed at the end."""
    value = processes.new_mark()
    yield value
    processes.kill_marked(value)


def _start(code: str, mark: str, tmp_path: Path, *, tethered: bool = False) -> ProcessRef:
    return processes.start(
        [sys.executable, "-c", code],
        env={**os.environ, MARK: mark},
        log=tmp_path / "log" / "out.txt",
        tethered=tethered,
    )


def _wait(condition: object, seconds: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_reused_pid_is_another_process(mark: str, tmp_path: Path) -> None:
    ours = _start(SLEEP, mark, tmp_path)
    assert ours.alive()
    imposter = ProcessRef(ours.pid, ours.created - 10.0)
    assert not imposter.alive()
    imposter.terminate()
    imposter.kill()
    processes.stop([imposter], processes.new_mark(), grace=0.1)
    assert ours.alive()
    assert ProcessRef.from_json(ours.to_json()).alive()
    ours.kill()
    assert not ours.alive()
    assert ours.exit_code() == -signal.SIGKILL


def test_a_process_that_is_gone_cannot_be_referred_to(mark: str, tmp_path: Path) -> None:
    ended = _start("pass", mark, tmp_path)
    _wait(lambda: not ended.alive())
    with pytest.raises(ProcessLookupError):
        ProcessRef.of(ended.pid)
    ended.kill()  # does nothing


def test_a_zombie_counts_as_gone(mark: str, tmp_path: Path) -> None:
    popen = subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        reference = ProcessRef.of(popen.pid)
        _wait(lambda: not reference.alive())  # nobody has waited for it yet
        assert psutil.Process(popen.pid).status() == psutil.STATUS_ZOMBIE
    finally:
        popen.wait()


def test_orphans_in_sessions_of_their_own_are_found_by_the_mark(mark: str, tmp_path: Path) -> None:
    parent = _start(FORKS, mark, tmp_path)
    log = tmp_path / "log" / "out.txt"
    _wait(lambda: "ready" in log.read_text())
    parent.kill()
    orphans = processes.marked(mark)
    assert [orphan.cmdline()[-1] for orphan in orphans] == [SLEEP]
    assert processes.kill_marked(mark) == 1
    assert not processes.marked(mark)


def test_stop_ends_a_tree_that_ignores_sigterm(mark: str, tmp_path: Path) -> None:
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + FORKS
    parent = _start(stubborn, mark, tmp_path)
    log = tmp_path / "log" / "out.txt"
    _wait(lambda: "ready" in log.read_text())
    processes.stop([parent], mark, grace=0.2)
    assert not parent.alive()
    assert not processes.marked(mark)


def test_what_is_spared_lives_on(mark: str, tmp_path: Path) -> None:
    kept, lost = _start(SLEEP, mark, tmp_path), _start(SLEEP, mark, tmp_path)
    processes.kill_marked(mark, spare=[kept])
    try:
        assert processes.wait_gone([lost], 20.0) and kept.alive()
    finally:
        kept.kill()


def test_a_process_is_found_by_its_open_files(mark: str, tmp_path: Path) -> None:
    held = tmp_path / "held"
    held.mkdir()
    code = f"file = open({str(held / 'x')!r}, 'w'); print('ready', flush=True)\n{SLEEP}"
    other = _start(code, processes.new_mark(), tmp_path)
    _wait(lambda: "ready" in (tmp_path / "log" / "out.txt").read_text())
    assert processes.marked(mark) == []
    assert [process.pid for process in processes.marked(mark, held)] == [other.pid]
    processes.kill_marked(mark, folder=held)
    assert not other.alive()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_tethered_process_ends_with_its_parent(mark: str, tmp_path: Path) -> None:
    code = f"""
import os, sys
from pathlib import Path
from flower_geo.launch import processes
child = processes.start(
    [sys.executable, "-c", {SLEEP!r}], env=dict(os.environ), log=Path({str(tmp_path / "c")!r}),
    tethered=True,
)
print(child.pid, flush=True)
{SLEEP}
"""
    parent = _start(code, mark, tmp_path)
    log = tmp_path / "log" / "out.txt"
    _wait(lambda: log.read_text().strip())
    child = ProcessRef.of(int(log.read_text().split()[0]))
    # until it has become the command, the tether's own interpreter is there
    _wait(lambda: SLEEP in psutil.Process(child.pid).cmdline())
    parent.kill()
    _wait(lambda: not child.alive())


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot start /nowhere/tool: No such file"):
        processes.start(["/nowhere/tool"], env={}, log=tmp_path / "log")


def test_free_ports_are_free_and_different() -> None:
    ports = processes.free_ports(5)
    assert len(set(ports)) == 5
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", ports[0]))
        sock.listen()
        assert not processes.port_is_free(ports[0])
    assert processes.port_is_free(ports[1])


def test_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert processes.last_lines(log) == ""
    log.write_bytes(b"\n".join(b"line %d" % n for n in range(9999)) + b"\n\xff\n")
    assert processes.last_lines(log, 2) == "line 9998\n\ufffd"
