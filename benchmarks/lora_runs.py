"""Federated LoRA runs in one process: our rules, and Flower's FedAvg beside them.

The real strategies over the real site code, without sockets (``tests/federation.py``).
All train the same base on the same rows: four sites, the 21 shipped categories of
instructions dealt among them.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.figures import REPO, output_folder

SITES, LENGTH, BATCH = 4, 128, 4
RANK, MIXED = 16, (4, 8, 16, 32)
#: alpha over rank, at every site whatever its rank.
SCALE = 2.0
#: Learning rates: the best of 3e-3, 1e-2 and 3e-2 for each rule in a run of seed 9.
RATES = {
    "avg": 1e-2, "ffa": 3e-2, "alternate": 1e-2, "stack": 3e-2, "residual": 1e-2, "svd": 1e-2,
    "flower": 1e-2,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        steps: local steps of a site in a whole run.
        rounds: of the rules that send an adapter up and one down a round.
        seeds: runs of each kind.
        base_rounds, base_steps: of the base's pretraining.
    """

    steps: int = 96
    rounds: int = 16
    seeds: int = 3
    base_rounds: int = 10
    base_steps: int = 40


QUICK = Sizes(steps=4, rounds=2, seeds=1, base_rounds=1, base_steps=2)

#: Rounds of a rule against those of one that sends an adapter up and one down, for the same
#: bytes, as measured: half an adapter each way (of ``alternate`` only up, since what coding
#: lost of the idle side still goes down) is more rounds, folds of all sites' ranks fewer.
MORE_ROUNDS = {"ffa": 2.0, "alternate": 1.35, "stack": 0.32, "residual": 0.32}


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        rule: of aggregation, or ``flower`` for Flower's FedAvg.
        mixed: ranks 4, 8, 16 and 32 instead of 16 at all sites.
        wire: codec both ways, or the name of one of the app's presets.
        rounds: that the local steps are cut into.
        seed: of the adapter and of the order of rows.
        rate: learning rate, 0 = the rule's.
    """

    rule: str
    mixed: bool
    wire: str
    rounds: int
    seed: int
    rate: float = 0.0

    @property
    def key(self) -> str:
        """A name for what was kept."""
        return json.dumps(asdict(self))


def rounds_for(rule: str, sizes: Sizes) -> int:
    """Rounds that cost about the same bytes under any rule; they divide the steps."""
    wanted = MORE_ROUNDS.get(rule, 1.0) * sizes.rounds
    fitting = [count for count in range(1, sizes.steps + 1) if sizes.steps % count == 0]
    return min(fitting, key=lambda count: abs(math.log(count / wanted)))


def pretrained(sizes: Sizes) -> Path:
    """Folder of the base: llama-nano after some rounds of DiLoCo on the shipped corpora.

    Made once for each of the sizes, and kept among the artefacts.
    """
    from flower_geo.config import DiLoCoConfig, parse
    from flower_geo.strategies import DiLoCo, initial_arrays
    from tests.federation import MemoryGrid, sites

    kept = output_folder().parent / f"lora-base-{sizes.base_rounds}x{sizes.base_steps}"
    if (kept / "config.json").exists():
        return kept
    with quiet(), tempfile.TemporaryDirectory() as folder:
        config = parse(
            DiLoCoConfig,
            {
                "model": "llama-nano", "rounds": sizes.base_rounds,
                "inner-steps": sizes.base_steps, "seq-len": LENGTH, "batch-size": BATCH,
                "inner-lr": 3e-3, "warmup-steps": min(50, sizes.base_steps), "eval-every": 0,
                "eval-tokens": 16_384, "sample-tokens": 0, "codec-up": "fp32",
                "codec-down": "fp32", "run-dir": f"{folder}/runs",
            },
        )  # fmt: skip
        DiLoCo(config).start(
            MemoryGrid(sites(SITES, f"{folder}/state")), initial_arrays(config)
        )  # fmt: skip
        whole = Path(folder) / "whole"
        shutil.copytree(Path(config.run_dir) / config.run_name / "model", whole)
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(whole, kept.with_suffix(".new"), dirs_exist_ok=True)
        kept.with_suffix(".new").rename(kept)
    return kept


@contextmanager
def quiet() -> Iterator[None]:
    """Without the log of each round."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def wire(name: str) -> dict[str, Any]:
    """Run-config keys of a codec both ways, or of one of the app's presets."""
    from flower_geo.config import parse_overrides

    preset = REPO / "apps/fedavg_lora/presets" / f"{name}.toml"
    if preset.exists():
        return parse_overrides([str(preset)])
    return {"codec-up": name, "codec-down": name}


def values(run: Run, steps: int, model: str) -> dict[str, Any]:
    """Run configuration of one of our runs with so many local steps in all."""
    rank = max(MIXED) if run.mixed else RANK
    return {
        "model": model, "aggregation": run.rule, "rank": rank, "alpha": SCALE * rank,
        "rounds": run.rounds, "inner-steps": steps // run.rounds, "seq-len": LENGTH,
        "batch-size": BATCH, "inner-lr": run.rate or RATES[run.rule],
        "warmup-steps": min(10, steps // 4), "eval-every": max(1, run.rounds // 4),
        "eval-tokens": 0, "sample-tokens": 0, "seed": run.seed, **wire(run.wire),
    }  # fmt: skip


def measure(run: Run, steps: int, model: str) -> dict[str, Any]:
    """Do one run in this process.

    Returns:
        ``course``: [round, bytes up, bytes down, held-out loss] with bytes so far, of all
        sites; ``error``: mean relative error of the rounds' aggregation.
    """
    torch.set_num_threads(1)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        if run.rule == "flower":
            return _flower(run, steps, model, folder)
        return _ours(values(run, steps, model), run.mixed, folder)


class _Roomy(dict[Any, Any]):
    """A site's process has one model; here all sites' are kept, not built each round."""

    def clear(self) -> None:
        """Nothing goes."""


def _ours(config_values: Mapping[str, Any], mixed: bool, folder: str) -> dict[str, Any]:
    from flower_geo.config import FedAvgLoRAConfig, parse
    from flower_geo.observe import read_metrics
    from flower_geo.site.tasks import adapters
    from flower_geo.strategies import FedAvgLoRA, initial_arrays
    from tests.federation import MemoryGrid, sites

    adapters._benches = _Roomy()
    config = parse(FedAvgLoRAConfig, {**config_values, "run-dir": f"{folder}/runs"})
    nodes = sites(SITES, f"{folder}/state")
    if mixed:
        for node, rank in zip(nodes, MIXED, strict=True):
            node.config |= {"rank": rank, "alpha": SCALE * rank}
    strategy = FedAvgLoRA(config)
    _ = strategy.model.model  # before the sites load theirs: transformers loads one at a time
    strategy.start(MemoryGrid(nodes), initial_arrays(config))
    events = read_metrics(Path(config.run_dir) / config.run_name / "metrics.jsonl")
    up = down = 0
    sent = {0: (0, 0)}
    for event in events:
        if event["event"] == "round":
            up, down = up + event["bytes_up"], down + event["bytes_down"]
            sent[event["round"]] = (up, down)
    course = [
        [event["round"], *sent[event["round"]], event["loss"]]
        for event in events
        if event["event"] == "eval" and event["site"] == "*"
    ]
    errors = [event["error"] for event in events if event["event"] == "aggregation"]
    return {"course": course, "error": mean(errors)}


def _flower(run: Run, steps: int, model: str, folder: str) -> dict[str, Any]:
    from benchmarks.flower_lora.client_app import app
    from benchmarks.flower_lora.server_app import fedavg
    from tests.federation import MemoryGrid, sites

    nodes = sites(SITES, folder)
    for node in nodes:
        node.app = app
    asked = flower_values(run.rounds, steps, model, run.seed) | (
        {"inner-lr": run.rate} if run.rate else {}
    )
    result, rounds = fedavg(MemoryGrid(nodes), asked)
    up, down = (sum(each[way] for each in rounds) for way in ("bytes_up", "bytes_down"))
    loss = held_out(result.arrays.to_torch_state_dict(), model)
    return {"course": [[run.rounds, up, down, loss]], "error": None}


def flower_values(rounds: int, steps: int, model: str, seed: int) -> dict[str, Any]:
    """Run configuration of the app of Flower alone."""
    return {
        "model": model, "tokenizer": "builtin", "rounds": rounds, "inner-steps": steps // rounds,
        "inner-lr": RATES["flower"], "batch-size": BATCH, "seq-len": LENGTH, "rank": RANK,
        "alpha": SCALE * RANK, "seed": seed, "clients": SITES,
    }  # fmt: skip


def held_out(state: Mapping[str, torch.Tensor], model: str) -> float:
    """Loss a token of an adapter of rank 16 over the four sites' held-out answers."""
    from flower_geo.data import load_tokenizer
    from flower_geo.data.instructions import (
        collate,
        instruction_spec,
        pad_id_of,
        prepare_instructions,
    )
    from flower_geo.models import AdapterSpec, attach, load_adapter_state, load_base
    from flower_geo.site.identity import cache_folder
    from flower_geo.training import evaluate_instructions

    words = load_tokenizer()
    base = load_base(model, seed=0, vocab_size=len(words), max_seq_len=LENGTH)
    adapted = attach(base, AdapterSpec(rank=RANK, alpha=SCALE * RANK), seed=0)
    load_adapter_state(adapted, state)
    found = [
        evaluate_instructions(
            adapted,
            prepare_instructions(
                instruction_spec("builtin", {}, site, SITES), words, seq_len=LENGTH,
                cache_dir=cache_folder({}),
            ).held_out,
            lambda rows: collate(rows, pad_id_of(words)),
            BATCH,
        )
        for site in range(SITES)
    ]  # fmt: skip
    return sum(each.loss_sum for each in found) / sum(each.tokens for each in found)
