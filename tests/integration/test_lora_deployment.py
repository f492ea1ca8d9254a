"""apps/fedavg_lora on one real SuperLink and three real SuperNodes, one of them killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peft import PeftModel

from flower_geo.launch.cluster import LocalCluster
from flower_geo.models import build_model
from flower_geo.observe import read_metrics
from tests.integration.test_deployment import committed, finished, start_app, three_sites, wait_for

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "model": "llama-pico", "rounds": 3, "inner-steps": 20, "seq-len": 64, "batch-size": 4,
    "warmup-steps": 2, "eval-tokens": 256, "eval-every": 0, "min-sites": 2, "sample-tokens": 8,
    "rank": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with three_sites("itest-lora", tmp_path_factory) as started:
        yield started


@pytest.mark.parametrize("rule", ["svd", "residual"])
def test_a_supernode_is_killed_and_the_adapter_comes_out(
    rule: str, cluster: LocalCluster, tmp_path: Path
) -> None:
    settings = SETTINGS | {"aggregation": rule}
    process = start_app("fedavg_lora", "itest-lora", tmp_path, "tuned", settings)
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
