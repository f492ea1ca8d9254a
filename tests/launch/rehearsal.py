"""A SuperLink and a ServerApp that only pretend, for the tests of what follows a run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flower_geo.launch.flwr_cli import FlwrCli, RunStatus
from flower_geo.observe import MetricsLog

__all__ = ["FakeServer", "RehearsedCli", "Shown"]


class FakeServer:
    """What a script uses to behave like a ServerApp with a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = MetricsLog(folder / "metrics.jsonl")
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        self._put_pid(self.process.pid)

    def _put_pid(self, pid: int) -> None:
        fresh = self.folder / ".pid"
        fresh.write_text(f"{pid}\n")
        os.replace(fresh, self.folder / "server.pid")

    def foreign(self) -> None:
        """Pretend to run where pids are others: in another container."""
        self._put_pid(2**22 + 1)

    def emit(self, event: str, **values: Any) -> None:
        """Append to the metrics."""
        self.log.append(event=event, **values)

    def die(self) -> None:
        """End without a word."""
        self.process.kill()
        self.process.wait()
        self.log.close()

    def end(self, status: str, reason: str = "", **values: Any) -> None:
        """End as a strategy does."""
        self.emit("end", status=status, reason=reason, **values)
        (self.folder / "server.pid").unlink()
        self.die()


class RehearsedCli(FlwrCli):
    """Plays one script a submission, in a thread, as the submitted app.

    Attributes:
        now: what the SuperLink says of the run.
        stopped: ids of runs that were told to stop.
        submitted: run configurations, by submission.
    """

    def __init__(self, folder: Path, *scripts: Callable[[RehearsedCli], None]) -> None:
        super().__init__("rehearsal", folder)
        self.folder = folder
        self.now: RunStatus | Exception = RunStatus("running", "")
        self.stopped: list[str] = []
        self.submitted: list[Mapping[str, Any]] = []
        self._scripts = list(scripts)
        self._threads: list[threading.Thread] = []

    def submit(
        self, app: Path, run_config: Mapping[str, Any], federation_config: Mapping[str, Any]
    ) -> str:
        self.submitted.append(run_config)
        self.now = RunStatus("running", "")
        script = self._scripts.pop(0)
        if isinstance(script, Exception):
            raise script
        thread = threading.Thread(target=script, args=(self,))
        self._threads.append(thread)
        thread.start()
        return str(len(self.submitted))

    def status(self, run_id: str) -> RunStatus:
        assert run_id == str(len(self.submitted))
        if isinstance(self.now, Exception):
            raise self.now
        return self.now

    def stop(self, run_id: str) -> None:
        self.stopped.append(run_id)

    def join(self) -> None:
        """Wait for the scripts, and see that all were played."""
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        assert not self._scripts


class Shown:
    """Takes what a person would see."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.notes: list[str] = []

    def update(self, event: Mapping[str, Any]) -> None:
        self.events.append(dict(event))

    def note(self, line: str) -> None:
        self.notes.append(line)
