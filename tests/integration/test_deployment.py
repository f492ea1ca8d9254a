"""apps/diloco on one real SuperLink and three real SuperNodes, with kills.

One cluster serves all tests here; each test is a run of its own.  The runs are
small (gpt2-pico), the processes, sockets and kills are real.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flower_geo.launch.cluster import LocalCluster
from flower_geo.observe import read_metrics
from flower_geo.resilience import Journal

REPO = Path(__file__).resolve().parents[2]
FLOWER_GEO = Path(sys.executable).with_name("flower-geo")

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "model": "gpt2-pico", "rounds": 3, "inner-steps": 4, "seq-len": 32, "batch-size": 4,
    "warmup-steps": 2, "eval-tokens": 256, "eval-every": 0, "min-sites": 2, "sample-tokens": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with three_sites("itest", tmp_path_factory) as started:
        yield started


def three_sites(name: str, tmp_path_factory: pytest.TempPathFactory) -> LocalCluster:
    """A cluster to be entered; its coordinator looks for work all the time."""
    env = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05", "OMP_NUM_THREADS": "1"}
    return LocalCluster(3, name=name, folder=tmp_path_factory.mktemp("cluster") / "c", env=env)


def start(run_dir: Path, name: str, **settings: Any) -> subprocess.Popen[str]:
    """A DiLoCo run of this module's settings."""
    return start_app("diloco", "itest", run_dir, name, SETTINGS | settings)


def start_app(
    app: str, cluster: str, run_dir: Path, name: str, settings: dict[str, Any]
) -> subprocess.Popen[str]:
    """``flower-geo run`` as people start it."""
    values = settings | {"run-name": name, "run-dir": str(run_dir)}
    config = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in values.items())
    return subprocess.Popen(
        [str(FLOWER_GEO), "run", str(REPO / "apps" / app), cluster, "--plain", "-c", config],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=run_dir,
    )  # fmt: skip


def finished(process: subprocess.Popen[str]) -> str:
    """Wait; the run must have completed."""
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


def wait_for(folder: Path, event: str, round: int, seconds: float = 200.0) -> None:
    """Wait until the metrics log holds an event of a round."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        path = folder / "metrics.jsonl"
        if path.exists():
            text = path.read_text()
            if any(f'"event":"{event}","round":{round}' in line for line in text.splitlines()):
                return
        time.sleep(0.05)
    raise AssertionError(f"no {event} of round {round} in {folder} within {seconds} s")


def weights(folder: Path) -> dict[str, bytes]:
    tensors = load_file(folder / "model" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def committed(folder: Path) -> list[int]:
    return [
        e["round"] for e in Journal(folder / "journal.jsonl").entries() if e["what"] == "commit"
    ]


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a run nobody disturbed."""
    run_dir = tmp_path_factory.mktemp("undisturbed")
    output = finished(start(run_dir, "plain"))
    assert "report.html" in output
    return run_dir / "plain"


def test_a_run_on_real_processes_completes(undisturbed: Path) -> None:
    assert committed(undisturbed) == [1, 2, 3]
    rounds = [e for e in read_metrics(undisturbed / "metrics.jsonl") if e["event"] == "round"]
    assert [e["accepted"] for e in rounds] == [3, 3, 3]
    assert (undisturbed / "report.html").stat().st_size > 10_000


def test_the_serverapp_is_killed_and_the_run_ends_with_the_same_bits(
    cluster: LocalCluster, undisturbed: Path, tmp_path: Path
) -> None:
    process = start(tmp_path, "killed")
    folder = tmp_path / "killed"
    wait_for(folder, "waiting", 2)
    os.kill(int((folder / "server.pid").read_text()), signal.SIGKILL)
    output = finished(process)
    starts = [e for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "start"]
    assert [e["incarnation"] for e in starts] == [1, 2], output
    assert starts[1]["resumed_from"] >= 1
    assert committed(folder) == [1, 2, 3]
    assert weights(folder) == weights(undisturbed)


def test_a_supernode_is_killed_in_round_two_and_every_round_is_committed(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    process = start(tmp_path, "maimed", **{"inner-steps": 40})
    folder = tmp_path / "maimed"
    wait_for(folder, "round", 1)
    cluster.supernodes[2].kill()
    try:
        finished(process)
    finally:
        cluster.supernodes[2].restart()
    assert committed(folder) == [1, 2, 3]
    rounds = [e for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "round"]
    assert rounds[0]["accepted"] == 3
    assert rounds[1]["accepted"] == 2
