"""Starting processes, knowing them again, and stopping them with all they started.

A pid alone names no process: the kernel hands it out again.  A process is known
by its pid and the moment it was created, and what it started is found by a
random mark in the environment that only its descendants inherit, so that
orphans are found as well.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from flower_geo.errors import StateError

__all__ = [
    "MARK",
    "ProcessRef",
    "descendants",
    "free_ports",
    "kill_marked",
    "last_lines",
    "marked",
    "new_mark",
    "port_is_free",
    "start",
    "stop",
    "wait_gone",
]

#: Environment variable that holds the mark.
MARK = "FLOWER_GEO_LAUNCH"

#: Seconds by which two readings of one creation time may differ.
_SAME_MOMENT = 0.05


@dataclass
class ProcessRef:
    """A process on this machine.

    Attributes:
        pid: process id.
        created: creation time, Unix seconds, as psutil reads it.
    """

    pid: int
    created: float
    popen: subprocess.Popen[bytes] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, pid: int) -> ProcessRef:
        """Reference to the process that has ``pid`` now.

        Raises:
            ProcessLookupError: there is none.
        """
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            raise ProcessLookupError(f"no process has pid {pid}") from None

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ProcessRef:
        """Reverse of :meth:`to_json`."""
        return cls(int(value["pid"]), float(value["created"]))

    def to_json(self) -> dict[str, Any]:
        """Mapping that can be stored as JSON."""
        return {"pid": self.pid, "created": self.created}

    def process(self) -> psutil.Process | None:
        """The process, or None when it has ended or its pid belongs to another one."""
        if self.popen is not None and self.popen.poll() is not None:
            return None
        try:
            process = psutil.Process(self.pid)
            if abs(process.create_time() - self.created) > _SAME_MOMENT:
                return None
            # Our own child is there until it is reaped: a zombie may have threads that still end.
            if self.popen is None and process.status() == psutil.STATUS_ZOMBIE:
                return None
            return process
        except psutil.NoSuchProcess:
            return None

    def alive(self) -> bool:
        """Whether it still runs."""
        return self.process() is not None

    def kill(self) -> None:
        """SIGKILL it, and wait until it is gone; does nothing when it has ended."""
        process = self.process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        wait_gone([self], 5.0)

    def terminate(self) -> None:
        """SIGTERM it; does nothing when it has ended."""
        process = self.process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()

    def exit_code(self) -> int | None:
        """Exit code where the process was started by this one and has ended."""
        return None if self.popen is None else self.popen.poll()


def wait_gone(references: Sequence[ProcessRef], seconds: float) -> bool:
    """Wait until all have ended; False when some have not after ``seconds``."""
    deadline = time.monotonic() + seconds
    while any(reference.alive() for reference in references):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def new_mark() -> str:
    """A mark no other launch has."""
    return secrets.token_hex(12)


def start(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: Path,
    cwd: Path | None = None,
    tethered: bool = False,
) -> ProcessRef:
    """Start a process in a session of its own, its output appended to ``log``.

    Args:
        command: program and arguments; the program is an absolute path.
        env: its whole environment.
        log: file for standard output and error.
        cwd: its working folder, ours by default.
        tethered: it ends when this process does, even by SIGKILL (Linux); else
            it is detached and lives on.

    Raises:
        StateError: it cannot be started.
    """
    whole = list(command)
    if tethered:
        tether = str(Path(__file__).with_name("tether.py"))
        whole = [sys.executable, "-I", "-S", tether, str(os.getpid()), *whole]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            popen = subprocess.Popen(
                whole,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    except OSError as error:
        raise StateError(f"cannot start {command[0]}: {error.strerror or error}") from error
    # Not yet reaped, so it is there even when it has ended already.
    return ProcessRef(popen.pid, psutil.Process(popen.pid).create_time(), popen)


def marked(mark: str, folder: Path | None = None) -> list[psutil.Process]:
    """Living processes of this user that carry ``mark``, this one left out.

    Args:
        mark: value of the mark's variable.
        folder: also those with a file open below it: a process that renames
            itself, as Ray's workers do, may overwrite what the kernel shows
            as its environment.
    """
    found = []
    prefix = f"{folder}{os.sep}" if folder is not None else None
    for process in psutil.process_iter():
        if process.pid == os.getpid():
            continue
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark or (
                prefix is not None
                and any(file.path.startswith(prefix) for file in process.open_files())
            ):
                found.append(process)
        except (psutil.Error, OSError):
            continue  # ended meanwhile, or another user's
    return found


def descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes and all they started that still hangs below them, zombies left out."""
    found: dict[int, psutil.Process] = {}
    for process in processes:
        with contextlib.suppress(psutil.Error):
            for one in (process, *process.children(recursive=True)):
                if _lives(one):
                    found[one.pid] = one
    found.pop(os.getpid(), None)
    return list(found.values())


def kill_marked(
    mark: str,
    *,
    folder: Path | None = None,
    spare: Iterable[ProcessRef] = (),
    seconds: float = 10.0,
) -> int:
    """SIGKILL everything that carries ``mark``, until nothing does; return how many.

    Args:
        mark: value of the mark's variable.
        folder: see :func:`marked`.
        spare: processes to leave alone.
        seconds: give up after that long.

    Raises:
        StateError: some do not end.
    """
    kept = {reference.pid for reference in spare}
    killed: set[int] = set()
    deadline = time.monotonic() + seconds
    while True:
        # Parents first: a supervisor must not put a new child in a dead one's place.
        found = [p for p in descendants(marked(mark, folder)) if p.pid not in kept]
        for process in sorted(found, key=lambda p: (_created(p), p.pid)):
            killed.add(process.pid)
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not found:
            return len(killed)
        _wait_dead(found, 0.5)
        if time.monotonic() > deadline:
            pids = ", ".join(str(process.pid) for process in found)
            raise StateError(f"processes {pids} do not end; look at them with: ps -fp {pids}")


def _created(process: psutil.Process) -> float:
    try:
        return float(process.create_time())
    except psutil.Error:
        return 0.0


def _lives(process: psutil.Process) -> bool:
    """Whether it runs; a zombie whose parent does not look after it counts as gone."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _wait_dead(found: list[psutil.Process], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while any(_lives(process) for process in found) and time.monotonic() < deadline:
        time.sleep(0.01)


def stop(references: Sequence[ProcessRef], mark: str, *, grace: float = 5.0) -> None:
    """SIGTERM the processes, in order, then SIGKILL what is left of their descendants.

    The caller's references are verified by creation time: a pid that now
    belongs to another process is left alone.

    Args:
        references: processes to stop.
        mark: the mark their descendants carry.
        grace: seconds until SIGKILL.
    """
    for reference in references:
        reference.terminate()
    wait_gone(references, grace)
    for reference in references:
        reference.kill()
    kill_marked(mark)


def free_ports(count: int) -> list[int]:
    """Different TCP ports that were free on 127.0.0.1 a moment ago."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            sock = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            sock.bind(("127.0.0.1", 0))
            ports.append(int(sock.getsockname()[1]))
        return ports


def port_is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen on the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
        except OSError:
            return False
        return True


def last_lines(path: Path, count: int = 12) -> str:
    """The last lines of a log, for an error message; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 16_384))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    return "\n".join(line for line in lines[-count:])
