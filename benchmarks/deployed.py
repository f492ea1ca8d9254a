"""A real SuperLink and real SuperNodes on this machine, and runs on them, to be measured."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import REPO
from flower_geo.launch import processes
from flower_geo.launch.cluster import LocalCluster
from flower_geo.observe import read_metrics

#: Sites share few cores here, and each has a machine of its own in life.  Tied to a core
#: each, those on the other core gain nothing when one dies.
CORES = sorted(os.sched_getaffinity(0))


class Deployment:
    """A cluster in a folder of its own.

    Attributes:
        cluster: SuperLink and sites.
        run: the newest ``flower-geo run``.
    """

    def __init__(self, folder: Path, cluster: LocalCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.run: subprocess.Popen[bytes] | None = None
        self._name = ""
        for index in range(len(cluster.supernodes)):
            self._tie(index)

    def _tie(self, site: int) -> None:
        core = CORES[site * len(CORES) // len(self.cluster.supernodes)]
        node = psutil.Process(self.cluster.supernodes[site].pid)
        for process in (node, *node.children(recursive=True)):
            process.cpu_affinity([core])

    # -- the run ---------------------------------------------------------------

    def submit(self, name: str, values: Mapping[str, Any]) -> None:
        """``flower-geo run`` as people start it."""
        whole = {**values, "run-name": name, "run-dir": str(self.folder / "runs")}
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in whole.items())
        self._name = name
        with (self.folder / "run.log").open("ab") as log:
            self.run = subprocess.Popen(
                [str(Path(sys.executable).with_name("flower-geo")), "run",
                 str(self.folder / "app"), self.cluster.connection, "--plain", "-c", config],
                env={**os.environ, "FLWR_HOME": str(self.cluster.flwr_home)}, cwd=self.folder,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    @property
    def run_folder(self) -> Path:
        """Folder of the newest run."""
        return self.folder / "runs" / self._name

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Events of the newest run so far."""
        return [e for e in read_metrics(self.run_folder / "metrics.jsonl") if e["event"] == kind]

    def goes_on(self) -> bool:
        """Whether the run is at work; raises when it ended badly."""
        assert self.run is not None
        code = self.run.poll()
        if code:
            raise RuntimeError((self.folder / "run.log").read_text()[-3000:])
        return code is None

    def finish(self) -> None:
        """Wait for the run's good end."""
        while self.goes_on():
            time.sleep(0.2)

    # -- the sites -------------------------------------------------------------

    def beats(self, site: int, since: float, round: int) -> list[dict[str, Any]]:
        """Steps that a site's worker told of since then, in that round."""
        try:
            lines = (self.folder / "beats" / f"site-{site}.jsonl").read_text().splitlines()
        except FileNotFoundError:
            return []
        found = []
        for line in lines:
            try:
                beat = json.loads(line)
            except ValueError:
                continue  # its writer is at it, or was killed
            of_round = beat["name"] == "train_request" and beat["round"] == round
            if of_round and beat["step"] and beat["time"] >= since:
                found.append(beat)
        return found

    def worker_log(self, site: int) -> str:
        """What a site's workers wrote so far, over all runs."""
        logs = (self.folder / "cluster" / f"site-{site}" / "state").glob("*/*/worker.log")
        return "".join(log.read_text() for log in sorted(logs, key=lambda log: log.stat().st_mtime))

    def kill_worker(self, site: int) -> float:
        """Kill -9 a site's worker; Unix time of it."""
        mark = self.cluster.supernodes[site].mark
        found = [p for p in processes.marked(mark) if "flower_geo.site.worker" in p.cmdline()]
        at = time.time()
        for process in found:
            process.kill()
        if not found:
            raise RuntimeError(f"site-{site} has no worker to kill")
        return at

    def kill_site(self, site: int) -> None:
        """Kill -9 SuperNode, ClientApp and worker, as when a machine is lost, and start again."""
        node = self.cluster.supernodes[site]
        node.kill()
        node.start(tethered=True)
        node.changed()
        self._tie(site)


@contextmanager
def deployed(
    sites: int, site_config: Mapping[int, Mapping[str, Any]] | None = None
) -> Iterator[Deployment]:
    """A deployment that goes with all it left."""
    with tempfile.TemporaryDirectory(prefix="fgeo-bench-") as name:
        folder = Path(name)
        for each in ("beats", "runs", "tmp"):
            (folder / each).mkdir()
        shutil.copytree(REPO / "apps" / "diloco", folder / "app")
        shutil.copy(REPO / "benchmarks" / "watched_app" / "client_app.py", folder / "app")
        env = {
            "OMP_NUM_THREADS": "1", "BENCH_BEATS": str(folder / "beats"),
            "TMPDIR": str(folder / "tmp"), "FLOWER_GEO_CACHE_DIR": str(cache()),
        }  # fmt: skip
        cluster = LocalCluster(
            sites, name="bench", folder=folder / "cluster", flwr_home=folder / "flwr", env=env,
            site_config=site_config,
        )  # fmt: skip
        with cluster:
            made = Deployment(folder, cluster)
            try:
                yield made
            finally:
                if made.run is not None and made.run.poll() is None:
                    made.run.kill()
                    made.run.wait()


def cache() -> Path:
    """Where the tokenised corpora lie; the user's own, so that they are made once."""
    from flower_geo.site.identity import cache_folder

    return cache_folder({})
