"""A simulation of its own for one run: SuperLink, ServerApp and sites on this machine.

``flwr run`` on Flower's built-in local connection leaves a SuperLink behind for
good, with the environment of the first run.  This one has its own FLWR_HOME,
its own port and its own temporary folder, and goes with all its processes when
the run is over.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flower_geo.errors import StateError
from flower_geo.launch import processes
from flower_geo.launch.connections import add_connection
from flower_geo.launch.environment import child_environment, program
from flower_geo.launch.flwr_cli import FlwrCli
from flower_geo.launch.processes import MARK, ProcessRef

__all__ = ["PrivateSimulation", "healthy", "sweep", "wait_healthy"]

_PREFIX = "fgeo-"
_NAME = "simulation"

#: Ray on the loopback only (its switch for that is named after other systems),
#: without the parts that serve dashboards.
_RAY = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "false",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_BACKEND_LOG_LEVEL": "error",
    "RAY_DEDUP_LOGS": "0",
}


class PrivateSimulation:
    """A SuperLink in simulation mode, for the time of a ``with`` block.

    Args:
        sites: simulated SuperNodes.
        log: file for the output of all its processes.
        state: folder for the state of the simulated sites.
        env: further environment variables.

    Attributes:
        cli: ``flwr`` with this SuperLink's connection.
        superlink: its process.
        start_seconds, stop_seconds: how long that took.
    """

    def __init__(
        self, sites: int, *, log: Path, state: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.sites = sites
        self.log = log
        self.folder = Path()
        self.superlink: ProcessRef | None = None
        self.start_seconds = self.stop_seconds = 0.0
        self._mark = processes.new_mark()
        self._env = {"FLOWER_GEO_STATE_DIR": str(state), **_RAY, **(env or {})}

    @property
    def cli(self) -> FlwrCli:
        """``flwr`` with this SuperLink's connection."""
        return FlwrCli(_NAME, self.folder / "flwr")

    def federation_config(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        """Federation config of a run: one CPU a site, under the user's overrides."""
        return {
            "num-supernodes": self.sites,
            "client-resources-num-cpus": 1,
            "init-args-num-cpus": min(self.sites, os.cpu_count() or 1),
            "init-args-logging-level": "error",
            **overrides,
        }

    def __enter__(self) -> Self:
        began = time.monotonic()
        sweep()
        self.folder = _scratch_folder()
        try:
            _write_owner(self.folder, self._mark)
            self._start()
        except BaseException:
            self.stop()
            raise
        self.start_seconds = time.monotonic() - began
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _start(self) -> None:
        home = self.folder / "flwr"
        shutil.rmtree(home, ignore_errors=True)
        for _ in range(3):
            (port,) = processes.free_ports(1)
            self.superlink = processes.start(
                [
                    program("flower-superlink"), "--insecure", "--simulation",
                    "--host", "127.0.0.1", "--port", str(port),
                    "--disable-runtime-dependency-installation",
                ],
                env=child_environment(
                    {**self._env, MARK: self._mark, "RAY_TMPDIR": str(self.folder)}, home=home
                ),
                log=self.log,
                tethered=True,
            )  # fmt: skip
            if wait_healthy(self.superlink, port, 60.0):
                add_connection(home, _NAME, f"127.0.0.1:{port}")
                return
            self.superlink.kill()
            if processes.port_is_free(port):
                break  # it ended for another reason than a port taken meanwhile
        raise StateError(
            f"the simulation's SuperLink did not start; last lines of {self.log}:\n"
            + processes.last_lines(self.log)
        )

    def alive(self) -> bool:
        """Whether the SuperLink still runs."""
        return self.superlink is not None and self.superlink.alive()

    def renew(self) -> None:
        """Make ready for another submission after a crash.

        Whatever the crashed run left, such as simulated sites still at work, is
        killed; a SuperLink that died is started again.
        """
        spare = []
        if self.superlink is not None and (process := self.superlink.process()) is not None:
            spare.append(self.superlink)
            with contextlib.suppress(Exception):
                # its SuperExec; everything of a run hangs below that
                spare += [ProcessRef.of(child.pid) for child in process.children()]
        processes.kill_marked(self._mark, folder=self.folder, spare=spare)
        if not spare:
            self._start()

    def stop(self) -> None:
        """Kill all processes and remove the temporary folder; twice does nothing."""
        began = time.monotonic()
        with _uninterrupted():
            if self.superlink is not None:
                self.superlink.kill()
                self.superlink = None
                processes.kill_marked(self._mark, folder=self.folder)
            if self.folder != Path():
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder = Path()
        self.stop_seconds = time.monotonic() - began


def healthy(port: int, timeout: float = 1.0) -> bool:
    """Whether a Flower HTTP API answers on 127.0.0.1."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}/health", timeout=timeout) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, ValueError):
        return False


def wait_healthy(process: ProcessRef, port: int, seconds: float) -> bool:
    """Wait until the process serves; False when it ended or time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not process.alive():
            return False
        if healthy(port):
            # another program may have taken the port: ours ends at once then
            return process.alive()
        time.sleep(0.05)
    return False


def _scratch_folder() -> Path:
    """A new folder with a short path: Ray puts sockets below it, whose paths are limited."""
    base = tempfile.gettempdir()
    if len(base) > 24:
        base = "/tmp"
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))


def _write_owner(folder: Path, mark: str) -> None:
    owner = {**ProcessRef.of(os.getpid()).to_json(), "mark": mark}
    (folder / "owner.json").write_text(json.dumps(owner), encoding="utf-8")


def sweep() -> None:
    """Clear away simulations whose command was killed before it could do so."""
    for base in {tempfile.gettempdir(), "/tmp"}:
        for folder in Path(base).glob(f"{_PREFIX}*"):
            try:
                if folder.stat().st_uid != os.getuid():
                    continue
                owner = json.loads((folder / "owner.json").read_text(encoding="utf-8"))
                if ProcessRef.from_json(owner).alive():
                    continue
                processes.kill_marked(str(owner["mark"]), folder=folder)
            except (OSError, ValueError, KeyError, TypeError, StateError):
                continue
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Let a second Ctrl-C not break off the clearing away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
