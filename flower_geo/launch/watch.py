"""Looks after a submitted run from this machine: is its server still there?

A thread, because asking the SuperLink takes a second and the display goes on
meanwhile.  Cheap signs come first: the run folder's ``server.pid`` tells at
once that a ServerApp was killed, which the SuperLink notices a minute later.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from flower_geo.errors import FlowerGeoError, RunFailed
from flower_geo.launch.flwr_cli import FlwrCli, RunStatus, SuperLinkUnreachable
from flower_geo.launch.processes import ProcessRef

__all__ = ["ServerWatch", "Verdict"]

_LOOK = 0.2  # seconds between looks at files and processes
_ASK_EARLY = 4.0  # seconds between questions until the server has opened its folder
_ASK_LATE = 30.0  # and while it is seen to live
_ASK_CLOSED = 1.0  # and once it has closed its folder
_UNSEEN_AFTER = 90.0  # the run goes on, and no folder appears here
_CLOSING = 60.0  # time for report and hand-back after the end event
_REFUSALS = 3  # in a row, until a SuperLink that knows no such run is believed
_ASK_AGAIN = 2.0  # seconds after such a refusal
_CLOCKS = 2.0  # that far apart are the clocks of files and of processes
_SILENT = 90.0  # a SuperLink may be away that long


@dataclass(frozen=True)
class Verdict:
    """Why following ended.

    Attributes:
        reason: for people.
        status: the SuperLink's word, where it was asked.
        unseen: the run goes on, but not in this machine's folder.
    """

    reason: str
    status: RunStatus | None = None
    unseen: bool = False


class ServerWatch:
    """Watches one submission; make it before submitting, enter it after.

    Args:
        folder: the run's folder on this machine, if it is here.
        cli: the connection.
        alive: whether a SuperLink of ours still lives.
        private: nobody else uses the SuperLink, and it goes after the run.
        found: takes the ServerApp's process once it is seen on this machine.

    Attributes:
        run_id: to be set once submitted.
        offset: size of the metrics file before the submission.
        stamp: what the pid file was before it.
        server: the ServerApp, once it was seen on this machine.
        verdict: why following ended.
    """

    def __init__(
        self,
        folder: Path | None,
        cli: FlwrCli,
        alive: Callable[[], bool] = lambda: True,
        *,
        private: bool = False,
        found: Callable[[ProcessRef], None] = lambda server: None,
    ) -> None:
        self.run_id = ""
        self.offset = 0
        self.verdict = Verdict("interrupted")
        self._cli = cli
        self._alive = alive
        self._private = private
        self._pid_file = None if folder is None else folder / "server.pid"
        self.stamp = _stamp(self._pid_file)
        if folder is not None:
            with contextlib.suppress(OSError):
                self.offset = (folder / "metrics.jsonl").stat().st_size
        self.server: ProcessRef | None = None
        self._found = found
        self._opened = False
        self._ended_at: float | None = None
        self._done = threading.Event()
        self._quit = threading.Event()
        self._thread = threading.Thread(target=self._run, name="server-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._quit.set()
        if kind is not None:
            self._cli.cancel()
        self._thread.join()

    def resume(self, offset: int, stamp: tuple[int, int] | None, server: ProcessRef | None) -> None:
        """Watch a submission that another supervisor made; before entering."""
        self.offset, self.stamp = offset, stamp
        if server is not None:
            self.server, self._opened = server, True

    def done(self) -> bool:
        """Whether there is nothing more to wait for."""
        return self._done.is_set()

    def end_seen(self) -> None:
        """Say that the run has written its last event."""
        self._ended_at = time.monotonic()

    def _run(self) -> None:
        try:
            self.verdict = self._watch()
        except FlowerGeoError as error:
            self.verdict = Verdict(str(error))
        finally:
            self._done.set()

    def _watch(self) -> Verdict:
        began = asked = answered = time.monotonic()
        refused = 0
        while not self._quit.wait(_LOOK):
            if not self._alive():
                return Verdict("the SuperLink died")
            closed = self._look()
            if self.server is not None and not self.server.alive() and not closed:
                if self._ended_at is None:
                    time.sleep(2 * _LOOK)  # its last events may be on their way to us
                if self._ended_at is None:
                    return Verdict(f"the ServerApp (pid {self.server.pid}) died")
                closed = True
            now = time.monotonic()
            if self._ended_at is not None:
                late = now - self._ended_at > _CLOSING
                if (closed or late) and (self._private or late):
                    return Verdict("the run ended")
            every = _ASK_CLOSED if closed else _ASK_LATE if self._opened else _ASK_EARLY
            if now - asked < every:
                continue
            try:
                status = self._cli.status(self.run_id)
            except SuperLinkUnreachable as error:
                asked = time.monotonic()
                if self.server is not None and not closed:
                    answered = asked  # the server lives, that is what counts
                if asked - answered > _SILENT:
                    return Verdict(str(error))
                continue
            except RunFailed as error:
                refused += 1  # once may be a hiccup, such as a SuperLink that is just starting
                if refused >= _REFUSALS:
                    return Verdict(str(error))
                asked = time.monotonic() - every + min(every, _ASK_AGAIN)
                continue
            asked = answered = time.monotonic()
            refused = 0
            if status.finished:
                return Verdict(status.details or status.status, status)
            waited = now - began > _UNSEEN_AFTER and not self._private
            if waited and not self._opened and status.status == "running":
                return Verdict("", status, unseen=True)
        return Verdict("interrupted")

    def _look(self) -> bool:
        """Read the pid file; True once this submission's server has closed its folder."""
        stamp = _stamp(self._pid_file)
        if stamp is None:
            return self._opened or self._ended_at is not None
        if stamp == self.stamp:
            return False
        if not self._opened and self._pid_file is not None:
            try:
                pid = int(self._pid_file.read_text().split()[0])
            except (OSError, ValueError, IndexError):
                return False  # being written
            self._opened = True
            # A pid that is not there when first seen is one of another machine
            # or container: then only the SuperLink can tell.
            with contextlib.suppress(ProcessLookupError):
                server = ProcessRef.of(pid)
                # The server wrote its pid after it had begun; a later process
                # that was given the same pid is another one.
                if server.created < stamp[1] / 1e9 + _CLOCKS:
                    self.server = server
                    self._found(server)
        return False


def _stamp(path: Path | None) -> tuple[int, int] | None:
    """What tells one pid file from the next; None when there is none."""
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns
