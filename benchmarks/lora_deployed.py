"""Federated LoRA on real processes: ours and Flower's FedAvg, one after the other.

A SuperLink and four SuperNodes of this machine, whose traffic goes through a relay
that counts it; every process's peak memory is read while it lives.
"""

from __future__ import annotations

import json
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.deployed import cache
from benchmarks.figures import REPO
from benchmarks.lora_runs import SITES, Run, flower_values, held_out, values
from flower_geo.launch.cluster import LocalCluster
from flower_geo.launch.processes import MARK
from flower_geo.observe import read_metrics
from tests.integration.relay import Relay

#: What tells a process's part in a run, in its command line.
PARTS = {
    "ServerApp": "flwr-serverapp", "ClientApp": "flwr-clientapp",
    "worker": "flower_geo.site.worker", "SuperNode": "flower-supernode",
    "SuperLink": "flower-superlink",
}  # fmt: skip


class Peaks:
    """The most memory that a process of each part held.

    Attributes:
        mib: peak resident set of the largest process, by part.
    """

    def __init__(self, marks: Sequence[str]) -> None:
        self.marks, self.mib = set(marks), dict[str, float]()
        self._known: dict[int, psutil.Process | None] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            for pid in psutil.pids():
                try:
                    if pid not in self._known:
                        self._known[pid] = self._ours(psutil.Process(pid))
                    # A process has its parent's command line until it has one of its own.
                    if (process := self._known[pid]) and (part := _part(process)):
                        self.mib[part] = max(self.mib.get(part, 0.0), _peak(pid))
                except (psutil.Error, OSError, StopIteration):
                    continue  # ended meanwhile

    def _ours(self, process: psutil.Process) -> psutil.Process | None:
        return process if process.environ().get(MARK) in self.marks else None

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _part(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((part for part, word in PARTS.items() if word in line), "")


def _peak(pid: int) -> float:
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024


@contextmanager
def four_sites(folder: Path) -> Iterator[tuple[LocalCluster, Relay]]:
    """A cluster whose sites reach their coordinator through a relay only."""
    env = {"OMP_NUM_THREADS": "1", "FLOWER_GEO_CACHE_DIR": str(cache())}
    cluster = LocalCluster(
        SITES, name="lora", folder=folder / "cluster", flwr_home=folder / "flwr", env=env
    )  # fmt: skip
    with cluster, Relay(cluster.address) as relay:
        for node in cluster.supernodes:
            node.superlink = relay.address
            node.restart()
        yield cluster, relay


def side_by_side(base: Path, rounds: int, steps: int) -> dict[str, Any]:
    """Both runs on one cluster: bytes, seconds a round, peak memory and loss of each.

    Args:
        base: folder of the base model.
        rounds: of each run.
        steps: local steps of a site in a whole run.
    """
    found: dict[str, Any] = {"rounds": rounds, "steps": steps}
    with tempfile.TemporaryDirectory(prefix="fgeo-bench-") as name:
        folder = Path(name)
        with four_sites(folder) as (cluster, relay):
            # Theirs first: our workers would live on beside it for a while.
            theirs = flower_values(rounds, steps, str(base), 0) | {"out": str(folder)}
            whole = _run(
                cluster, relay, REPO / "benchmarks/flower_lora", theirs, folder / "rounds.json"
            )
            found["flower"] = whole | _flower(folder, str(base))
            ours = values(Run("svd", False, "lean", rounds, 0), steps, str(base)) | {
                "run-name": "lean", "run-dir": str(folder), "eval-every": 0, "min-sites": SITES,
            }  # fmt: skip
            whole = _run(cluster, relay, REPO / "apps/fedavg_lora", ours, folder / "lean/model")
            found["lean"] = whole | _ours(folder / "lean")
    return found


def _run(
    cluster: LocalCluster, relay: Relay, app: Path, config: Mapping[str, Any], sign: Path
) -> dict[str, Any]:
    """Run an app to its end; ``sign`` is there when it is near."""
    before, began = (relay.up, relay.down), time.monotonic()
    with Peaks([member.mark for member in cluster.members]) as peaks:
        run_id = cluster.cli.submit(app, config, {})
        asked = time.monotonic()
        while True:  # to ask Flower costs a second of a core, to look for a file nothing
            time.sleep(0.2)
            if sign.exists() or time.monotonic() - asked > 20:
                asked = time.monotonic()
                if (status := cluster.cli.status(run_id)).finished:
                    break
                time.sleep(1.0)
    if not status.completed:
        log = cluster.superlink.log.read_text(errors="replace")
        raise RuntimeError(f"{app.name}: {status}\n{log[-3000:]}")
    return {
        "socket_up": relay.up - before[0], "socket_down": relay.down - before[1],
        "mib": peaks.mib, "seconds": time.monotonic() - began,
    }  # fmt: skip


def _ours(folder: Path) -> dict[str, Any]:
    events = read_metrics(folder / "metrics.jsonl")
    rounds = [event for event in events if event["event"] == "round"]
    losses = [e["loss"] for e in events if e["event"] == "eval" and e["site"] == "*"]
    ends = [event["time"] for event in rounds]
    return {
        "up": sum(event["bytes_up"] for event in rounds),
        "down": sum(event["bytes_down"] for event in rounds),
        "outside": outside(ends, [event["seconds_slowest_site"] for event in rounds]),
        "loss": losses[-1],
    }  # fmt: skip


def _flower(folder: Path, base: str) -> dict[str, Any]:
    from safetensors.torch import load_file

    rounds = json.loads((folder / "rounds.json").read_text())
    return {
        "up": sum(each["bytes_up"] for each in rounds),
        "down": sum(each["bytes_down"] for each in rounds),
        "outside": outside(
            [each["ended"] for each in rounds], [max(each["seconds"]) for each in rounds]
        ),
        "loss": held_out(load_file(folder / "adapter.safetensors"), base),
    }


def outside(ends: Sequence[float], slowest: Sequence[float]) -> float:
    """Seconds of a round beside its slowest site's steps: the median.

    Args:
        ends: when each round ended; the first one starts processes, and is left out, and
            the last one may evaluate.
        slowest: seconds of training at the slowest site of each round.
    """
    rounds = range(1, max(2, len(ends) - 1))
    return median(ends[each] - ends[each - 1] - slowest[each] for each in rounds)
