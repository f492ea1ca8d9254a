"""What chaos is played on: a real deployment, its run, and hands to reach every part of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from flower_geo.errors import FlowerGeoError
from flower_geo.launch import processes
from flower_geo.launch.cluster import LocalCluster
from flower_geo.launch.members import Member
from flower_geo.launch.record import RunRecord
from tests.integration.relay import Relay

REPO = Path(__file__).resolve().parents[2]
FLOWER_GEO = Path(sys.executable).with_name("flower-geo")

#: All that a chaos run starts inherits this.
TOKEN = "CHAOS_TOKEN"

SETTINGS: dict[str, Any] = {
    "model": "gpt2-pico", "inner-steps": 4, "seq-len": 32, "batch-size": 4, "warmup-steps": 2,
    "eval-tokens": 256, "eval-every": 0, "min-sites": 2, "sample-tokens": 0, "quorum": "2",
    "deadline": 90.0, "strict-start": False, "max-retries": 12, "wait-for-sites": 240.0,
    "codec-up": "int4(block=64)",
}  # fmt: skip


class Stage:
    """One SuperLink, its sites behind a relay each, and one run.

    Args:
        folder: everything lies in it.
        sites: SuperNodes.
        rounds: rounds of the run.
        seed: of the run's model and data.
        database: the SuperLink remembers over a restart.
        settings: run configuration over the usual one.

    Attributes:
        cluster: the deployment.
        relays: one a site.
        run: the newest ``flower-geo run``.
        down: members that a fault holds down; others that end are started again.
        notes: what the driver had to do by hand.
    """

    def __init__(
        self, folder: Path, *, sites: int = 3, rounds: int = 6, seed: int = 0,
        database: bool = False, settings: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.token = folder, uuid.uuid4().hex
        self.runs = folder / "runs"
        self.run_folder = self.runs / "chaos"
        self.app = _make_app(folder / "app")
        for name in ("tmp", "misbehave", "kept", "runs"):
            (folder / name).mkdir()
        self.env = {
            "OMP_NUM_THREADS": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
            "FLOWER_GEO_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder / "tmp"),
            "CHAOS_STAGE": str(folder), TOKEN: self.token,
        }  # fmt: skip
        self.cluster = LocalCluster(
            sites, name="chaos", folder=folder / "cluster", env=self.env,
            flwr_home=folder / "flwr", database=database,
        )  # fmt: skip
        self.settings = SETTINGS | {"rounds": rounds, "seed": seed} | (settings or {})
        self.relays: list[Relay] = []
        self.run: subprocess.Popen[bytes] | None = None
        self.down: set[str] = set()
        self.notes: list[str] = []
        self._mounted = False

    # -- life ------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            self._mounted = _mount_small(self.runs)
            self.cluster.up()
            for node in self.cluster.supernodes:
                relay = Relay(self.cluster.address)
                self.relays.append(relay)
                node.superlink = relay.address
                node.restart(wait=False)
            for node in self.cluster.supernodes:
                node.wait()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything; the folder stays, what was on the small disk is copied back."""
        if self.run is not None and self.run.poll() is None:
            self.run.kill()
            self.run.wait()
        for relay in self.relays:
            relay.mend()
        self.cluster.down()
        for relay in self.relays:
            relay.__exit__(None, None, None)
        if self._mounted:
            saved = self.folder / "saved"
            shutil.copytree(self.runs, saved)
            subprocess.run(["umount", str(self.runs)], check=True)
            self.runs.rmdir()
            saved.rename(self.runs)
            self._mounted = False

    @property
    def small_disk(self) -> bool:
        """Whether the run folder lies on a small disk of its own."""
        return self._mounted

    # -- the run ---------------------------------------------------------------

    def submit(self) -> None:
        """``flower-geo run`` as people start it."""
        values = self.settings | {"run-name": "chaos", "run-dir": str(self.runs)}
        words = [
            f'{key}="{value}"' if isinstance(value, str) else f"{key}={json.dumps(value)}"
            for key, value in values.items()
        ]
        self._start(str(self.app), "chaos", "-c", " ".join(words))

    def attach(self) -> None:
        """Take the run up after its supervisor's death."""
        self._start("--attach", str(self.run_folder))

    def _start(self, *words: str) -> None:
        with (self.folder / "run.log").open("ab") as log:
            log.write(f"--- flower-geo run {' '.join(words)[:60]}\n".encode())
            self.run = subprocess.Popen(
                [str(FLOWER_GEO), "run", *words, "--plain"],
                env={**os.environ, **self.env, "FLWR_HOME": str(self.folder / "flwr")},
                cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def submitted(self) -> bool:
        """Whether Flower has taken the run."""
        try:
            return bool(RunRecord.load(self.run_folder).course.run_id)
        except FlowerGeoError:
            return False

    def journal(self) -> bytes:
        """Whole lines of the journal."""
        try:
            raw = (self.run_folder / "journal.jsonl").read_bytes()
        except OSError:
            return b""
        return raw[: raw.rfind(b"\n") + 1]

    def commits(self) -> int:
        """Commit lines in the journal."""
        return self.journal().count(b'"what": "commit"')

    def nodes(self) -> dict[str, dict[str, Any]]:
        """Node-config by site, to train again in another process."""
        cache = {"cache-dir": str(self.folder / "cache")}
        return {node.name: node.node_config | cache for node in self.cluster.supernodes}

    def committed_at(self, number: int) -> float | None:
        """Unix time of the commit line after ``number`` others; None when there is none."""
        lines = [line for line in self.journal().splitlines() if b'"what": "commit"' in line]
        return float(json.loads(lines[number])["time"]) if number < len(lines) else None

    # -- parts -----------------------------------------------------------------

    def tend(self) -> None:
        """Start again what ended by itself, as a service manager does."""
        for member in self.cluster.members:
            if member.name not in self.down and not member.alive():
                self.notes.append(f"{member.name} had ended and was started again")
                start_member(member)

    def pids(self, target: str, site: int) -> list[int]:
        """Processes that play a part now; none when there is no such at the moment."""
        if target == "supervisor":
            return [self.run.pid] if self.run is not None and self.run.poll() is None else []
        if target == "serverapp":
            return self._server()
        if target == "superlink":
            return [self.cluster.superlink.pid] if self.cluster.superlink.alive() else []
        node = self.cluster.supernodes[site]
        if target == "supernode":
            return [node.pid] if node.alive() else []
        words = {"clientapp": "flwr-clientapp", "worker": "flower_geo.site"}[target]
        return [p.pid for p in processes.marked(node.mark) if words in _words(p)]

    def _server(self) -> list[int]:
        try:
            pid = int((self.run_folder / "server.pid").read_text())
        except (OSError, ValueError):
            return []
        with contextlib.suppress(psutil.Error):
            # the file of a dead server may name a pid that is somebody else's now
            if psutil.Process(pid).environ().get(TOKEN) == self.token:
                return [pid]
        return []

    def leftovers(self) -> list[psutil.Process]:
        """Living processes that the stage has started, directly or not."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.pid != os.getpid()
                    and process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get(TOKEN) == self.token
                ):
                    found.append(process)
        return found


def start_member(member: Member, seconds: float = 0.0) -> None:
    """Start a member again after a while, what is left of it killed; does not wait until ready."""
    member.kill()
    time.sleep(seconds)
    member.start()
    member.changed()


def _words(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _make_app(folder: Path) -> Path:
    """The DiLoCo app's settings with chaos's own code."""
    folder.mkdir(parents=True)
    shutil.copy(REPO / "apps" / "diloco" / "pyproject.toml", folder)
    for path in (Path(__file__).parent / "app").glob("*.py"):
        shutil.copy(path, folder)
    return folder


def _mount_small(folder: Path) -> bool:
    """A disk of 48 MiB at ``folder``, where this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", "size=48m,mode=700", "tmpfs", str(folder)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        return False
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
