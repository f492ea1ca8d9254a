"""Requests a coordinator might send to a site that trains a very small model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_geo.compression import codec, content_hash, pack, record_blobs, unpack
from flower_geo.config import TRAINING_KEYS, DiLoCoConfig, parse
from flower_geo.messages import Reply, Request
from flower_geo.models import build_model, snapshot
from flower_geo.site.state import SiteState

VALUES: dict[str, Any] = {
    "rounds": 5, "inner-steps": 2, "seq-len": 16, "batch-size": 2, "warmup-steps": 1,
    "eval-tokens": 64,
}  # fmt: skip


class Desk:
    """Makes requests for one run whose initial weights it holds."""

    def __init__(self, **values: Any) -> None:
        self.config = parse(DiLoCoConfig, {**VALUES, **values})
        model = build_model("gpt2-nano", seed=self.config.seed, vocab_size=4096, max_seq_len=16)
        self.initial: dict[str, Tensor] = snapshot(model)
        self.hash = content_hash(self.initial)

    def request(self, round: int = 1, **values: Any) -> Request:
        public = self.config.public()
        steps = float(self.config.inner_steps)
        common: dict[str, Any] = {
            "run_name": "run", "run_uid": "uid", "round": round, "base_hash": self.hash,
            "fingerprint": self.config.fingerprint(), "position": max(round - 1, 0) * steps,
            "span": steps, "config": {key: public[key] for key in TRAINING_KEYS | {"rounds"}},
        }  # fmt: skip
        return Request(**(common | values))

    def snapshot(self, weights: dict[str, Tensor], version: int, round: int = 1) -> Request:
        return replace(
            self.request(round), version=version, base_hash=content_hash(weights),
            payload="snapshot", first=version, last=version, arrays=pack(weights, codec("fp32")),
        )  # fmt: skip


def update(reply: Reply) -> dict[str, Tensor]:
    assert reply.status == "done" and reply.arrays is not None, reply.detail
    return unpack(reply.arrays)


def blobs(reply: Reply) -> dict[str, bytes]:
    assert reply.arrays is not None, reply.detail
    return record_blobs(reply.arrays)


def write_texts(folder: Path) -> list[Path]:
    """Two different texts, a few thousand tokens each."""
    paths = []
    for name, word in (("north", "harbour"), ("south", "desert")):
        path = folder / f"{name}.txt"
        lines = [f"Line {i} of the {word} log: {i * i} boats, {i % 7} birds." for i in range(300)]
        path.write_text("\n\n".join(lines))
        paths.append(path)
    return paths


def state_of(node: dict[str, Any]) -> SiteState:
    return SiteState(Path(node["state-dir"]), "run", "uid", node["site"])


def folder_of(node: dict[str, Any]) -> Path:
    return Path(node["state-dir"]) / "run-uid" / str(node["site"])
