"""Requests a coordinator might send to a site that tunes a very small adapter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_geo.compression import codec, content_hash, pack, unpack
from flower_geo.config import FedAvgLoRAConfig, parse
from flower_geo.messages import Request
from flower_geo.strategies import initial_arrays

VALUES: dict[str, Any] = {
    "model": "llama-pico", "rounds": 4, "inner-steps": 3, "seq-len": 48, "batch-size": 2,
    "warmup-steps": 1, "eval-tokens": 0, "rank": 2, "alpha": 4.0, "codec-up": "fp32",
    "inner-lr": 1e-2, "sample-tokens": 0,
}  # fmt: skip


class AdapterDesk:
    """Makes requests for one run whose first adapter it holds."""

    def __init__(self, **values: Any) -> None:
        self.config = parse(FedAvgLoRAConfig, {**VALUES, **values})
        self.initial: dict[str, Tensor] = unpack(initial_arrays(self.config))
        self.hash = content_hash(self.initial)

    def request(self, round: int = 1, **values: Any) -> Request:
        public, steps = self.config.public(), float(self.config.inner_steps)
        keys = self.config.training_keys | {"rounds"}
        common: dict[str, Any] = {
            "run_name": "run", "run_uid": "uid", "round": round, "base_hash": self.hash,
            "fingerprint": self.config.fingerprint(), "position": max(round - 1, 0) * steps,
            "span": steps, "config": {key: public[key] for key in sorted(keys)},
            "accepted": round - 1,
        }  # fmt: skip
        return Request(**(common | values))

    def snapshot(
        self, weights: dict[str, Tensor], version: int, round: int, **values: Any
    ) -> Request:
        return replace(
            self.request(round, **values), version=version, base_hash=content_hash(weights),
            payload="snapshot", first=version, last=version, arrays=pack(weights, codec("fp32")),
        )  # fmt: skip


def write_pairs(path: Path, word: str = "harbour", count: int = 60) -> Path:
    rows = (
        {"question": f"How many {word} birds on day {i}?", "answer": f"{i % 7} birds"}
        for i in range(count)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
