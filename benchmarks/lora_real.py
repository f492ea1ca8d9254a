"""Federated LoRA on a real model: what each site has of joining.

The first layers of SmolLM2-135M-Instruct, which ``make smollm2`` writes, and the 21
shipped categories dealt to four sites.  Each site's held-out loss with the base, with an
adapter it trained alone, and with one trained together, at equal steps.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.figures import REPO, output_folder
from benchmarks.lora_runs import LENGTH, SITES, quiet, wire

__all__ = ["ALONE", "TOGETHER", "folder", "part"]

#: Names of the parts of this measurement: the sites together, and one by one.
TOGETHER, ALONE = "together", "alone"
FORM: dict[str, Any] = {
    "tokenizer": "model", "rank": 16, "alpha": 32.0, "rounds": 4, "inner-steps": 5,
    "batch-size": 4, "inner-lr": 1e-3, "warmup-steps": 2, "eval-every": 0, "eval-tokens": 0,
    "sample-tokens": 0, "seq-len": LENGTH,
}  # fmt: skip


def folder() -> Path | None:
    """Folder of the model, if it was written."""
    places = (output_folder().parent / "smollm2-8", REPO / "artefacts" / "smollm2-8")
    return next((place for place in places if (place / "config.json").exists()), None)


def part(which: str, model: str) -> dict[str, Any]:
    """Do one part in this process.

    Returns:
        by site: data, held-out loss before and after, labels; with bytes of all sites
        (``up``, ``down``) where they trained together.
    """
    from flower_geo.config import FedAvgLoRAConfig, parse
    from flower_geo.observe import read_metrics
    from flower_geo.strategies import FedAvgLoRA, initial_arrays
    from tests.federation import MemoryGrid, sites

    torch.set_num_threads(1)
    found: dict[str, Any] = {"sites": {}}
    groups = [range(SITES)] if which == TOGETHER else [[site] for site in range(SITES)]
    for group in groups:
        with quiet(), tempfile.TemporaryDirectory() as place:
            config = parse(
                FedAvgLoRAConfig,
                FORM | wire("lean") | {
                    "model": model, "aggregation": "svd", "min-sites": len(group),
                    "run-dir": place, "keep-optimizer": True,
                },
            )  # fmt: skip
            strategy = FedAvgLoRA(config)
            _ = strategy.model.model  # before the sites load theirs: one at a time
            nodes = sites(SITES, f"{place}/state")
            strategy.start(MemoryGrid(nodes[site] for site in group), initial_arrays(config))
            events = read_metrics(Path(config.run_dir) / config.run_name / "metrics.jsonl")
        for event in events:
            if event["event"] == "eval" and event["site"] != "*":
                site = found["sites"].setdefault(
                    event["site"], {"data": event["data"], "labels": event["tokens"]}
                )
                site["before" if event["round"] == 0 else "after"] = event["loss"]
        rounds = [event for event in events if event["event"] == "round"]
        found["parameters"] = next(e["parameters"] for e in events if e["event"] == "start")
        found["up"] = sum(event["bytes_up"] for event in rounds)
        found["down"] = sum(event["bytes_down"] for event in rounds)
    return found
