"""apps/fedavg_lora on one real SuperLink and three real SuperNodes, one of them killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from flower_geo.launch.cluster import LocalCluster
from flower_geo.models import build_model
from flower_geo.observe import read_metrics
from tests.integration.test_deployment import committed, finished, wait_for

REPO = Path(__file__).resolve().parents[2]
FLOWER_GEO = Path(sys.executable).with_name("flower-geo")

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "model": "llama-pico", "rounds": 3, "inner-steps": 20, "seq-len": 64, "batch-size": 4,
    "warmup-steps": 2, "eval-tokens": 256, "eval-every": 0, "min-sites": 2, "sample-tokens": 8,
    "rank": 4, "run-name": "tuned",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster")
    env = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05", "OMP_NUM_THREADS": "1"}
    with LocalCluster(3, name="itest-lora", folder=folder / "c", env=env) as started:
        yield started


@pytest.mark.parametrize("rule", ["svd", "residual"])
def test_a_supernode_is_killed_and_the_adapter_comes_out(
    rule: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    values = {**SETTINGS, "aggregation": rule, "run-dir": str(tmp_path)}
    config = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in values.items())
    process = subprocess.Popen(
        [str(FLOWER_GEO), "run", str(REPO / "apps/fedavg_lora"), "itest-lora", "--plain", "-c",
         config],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path,
    )  # fmt: skip
    folder = tmp_path / "tuned"
    wait_for(folder, "round", 1)
    cluster.supernodes[2].kill()
    try:
        finished(process)
    finally:
        cluster.supernodes[2].restart()
    assert committed(folder) == [1, 2, 3]
    rounds = [e for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "round"]
    assert rounds[0]["accepted"] == 3 and min(e["accepted"] for e in rounds) == 2
    base = build_model("llama-pico", seed=0, vocab_size=4096, max_seq_len=64)
    loaded: Any = PeftModel.from_pretrained(base, folder / "model")
    assert any(bool(p.any()) for name, p in loaded.named_parameters() if "lora_B" in name)
