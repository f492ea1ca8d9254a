"""Small DiLoCo runs in one process, shared by the tests of the strategies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from flwr.app import Message
from torch import Tensor

from flower_geo.compression import unpack
from flower_geo.config import CommonConfig, DiLoCoConfig, parse
from flower_geo.observe import read_metrics
from flower_geo.strategies import DiLoCo, initial_arrays
from tests.federation import MemoryGrid, Tamper, sites

SMALL: dict[str, Any] = {
    "model": "gpt2-pico",
    "rounds": 3, "inner-steps": 2, "seq-len": 16, "batch-size": 2, "warmup-steps": 1,
    "eval-tokens": 64, "sample-tokens": 0, "deadline": 1.0, "wait-for-sites": 1.0,
    "eval-every": 0, "inner-lr": 1e-3, "max-retries": 0,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "codec-up": "fp32", "codec-down": "fp32", "outer-lr": 1.0, "outer-momentum": 0.0,
}  # fmt: skip


def configured(tmp_path: Path, **values: Any) -> DiLoCoConfig:
    return parse(DiLoCoConfig, {**SMALL, "run-dir": str(tmp_path / "runs"), **values})


def federation(tmp_path: Path, count: int, tamper: Tamper | None = None, **node: Any) -> MemoryGrid:
    return MemoryGrid(sites(count, tmp_path / "state", **node), tamper)


def run(config: DiLoCoConfig, grid: MemoryGrid) -> dict[str, Tensor]:
    result = DiLoCo(config).start(grid, initial_arrays(config), num_rounds=config.rounds)
    return unpack(result.arrays)


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def events(config: CommonConfig, kind: str) -> list[dict[str, Any]]:
    path = Path(config.run_dir) / config.run_name / "metrics.jsonl"
    return [event for event in read_metrics(path) if event["event"] == kind]


class Killed(Exception):
    """Stands for kill -9: nothing of the session's clean end runs."""


def dying(when: int) -> Tamper:
    """Kill the server at its ``when``-th train reply."""
    seen = {"count": 0}

    def tamper(site: str, message: Message, reply: Message) -> list[Message]:
        if message.metadata.message_type == "train":
            seen["count"] += 1
            if seen["count"] == when:
                raise Killed
        return [reply]

    return tamper
