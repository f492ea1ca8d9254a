"""apps/split on real processes: a site's worker and the cloud's half are killed in mid-step."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from peft import PeftModel
from safetensors.torch import load_file

from flower_geo.launch import processes
from flower_geo.launch.cluster import LocalCluster
from flower_geo.models import build_model
from flower_geo.observe import read_metrics
from tests.integration.test_deployment import committed, finished, start_app

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900)]

SETTINGS: dict[str, Any] = {
    "model": "llama-pico", "rounds": 2, "inner-steps": 60, "seq-len": 64, "batch-size": 2,
    "grad-accum": 2, "warmup-steps": 2, "eval-tokens": 256, "eval-every": 0, "min-sites": 2,
    "sample-tokens": 8, "rank": 4, "snapshot-steps": 10, "dropout": 0.1, "max-retries": 0,
    "codec-activations": "int8(block=64)", "codec-gradients": "int8(block=64)",
}  # fmt: skip
CUTS: dict[str, dict[str, Any]] = {
    "u-shape": {"mode": "u-shape", "cut-bottom": 0, "cut-top": 1},
    "sfl-v2": {"mode": "sfl-v2", "cut-bottom": 1, "cut-top": 0},
}


def wait_for(true: Callable[[], bool], seconds: float = 240.0) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def rounds_begun(folder: Path) -> list[str]:
    """Labels of the cloud's rounds, as long as they are there."""
    return [path.name for path in (folder / "cloud" / "rounds").glob("*")]


def kill(mark: str, module: str) -> None:
    """Kill -9 what runs a module under a mark."""
    found = [p for p in processes.marked(mark) if module in p.cmdline()]
    assert found, f"no {module} is at work"
    for process in found:
        process.kill()
    psutil.wait_procs(found, timeout=10)


@pytest.mark.parametrize("mode", list(CUTS))
def test_worker_and_cloud_die_in_mid_step_and_the_end_is_the_undisturbed_one(
    mode: str, tmp_path: Path
) -> None:
    settings = SETTINGS | CUTS[mode]
    with LocalCluster(2, name="split", folder=tmp_path / "c") as cluster:
        finished(start_app("split", "split", tmp_path, "calm", settings))
        process = start_app("split", "split", tmp_path, "killed", settings)
        folder = tmp_path / "killed"
        wait_for(lambda: (folder / "checkpoints" / "round-000001").exists())
        first = rounds_begun(folder)
        wait_for(lambda: any(label not in first for label in rounds_begun(folder)))
        (label,) = (each for each in rounds_begun(folder) if each not in first)
        here = folder / "cloud" / "rounds" / label
        wait_for(lambda: (here / "step-000020").exists())
        kill(cluster.supernodes[0].mark, "flower_geo.site.worker")
        wait_for(lambda: (here / "step-000040").exists())
        kill(cluster.superlink.mark, "flower_geo.cloud")
        finished(process)
        left = [p for p in processes.marked(cluster.superlink.mark) if "cloud" in str(p.cmdline())]
    assert left == []
    ends = []
    for name in ("calm", "killed"):
        assert committed(tmp_path / name) == [1, 2]
        ends.append((tmp_path / name / "model" / "adapter_model.safetensors").read_bytes())
        sites = [
            event["site"]
            for event in read_metrics(tmp_path / name / "metrics.jsonl")
            if event["event"] == "site" and event["status"] == "accepted"
        ]
        assert sorted(sites) == ["site-0", "site-0", "site-1", "site-1"]
    assert ends[0] == ends[1]
    assert len(load_file(tmp_path / "calm" / "model" / "adapter_model.safetensors")) == 28
    base = build_model("llama-pico", seed=0, vocab_size=4096, max_seq_len=64)
    loaded: Any = PeftModel.from_pretrained(base, tmp_path / "killed" / "model")
    moved = [name for name, p in loaded.named_parameters() if "lora_B" in name and bool(p.any())]
    # Both the sites' layer and the cloud's.
    assert {name.split("layers.")[1][0] for name in moved} == {"0", "1"}
