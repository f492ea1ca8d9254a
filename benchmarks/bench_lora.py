"""Federated LoRA: the rules at the same bytes, and against Flower's own FedAvg.

Three parts: runs in one process for the losses (three seeds each), one run each on real
processes for bytes, seconds and memory, and one on a real model if ``make smollm2`` has
written it.  Every result is kept, so that an interrupted call goes on.

    python -m benchmarks.bench_lora             # about 25 minutes on two cores
    python -m benchmarks.bench_lora --resume    # goes on where it was interrupted
    python -m benchmarks.bench_lora --quick     # two: the first part only, to see that it works
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import lora_real
from benchmarks.figures import Kept, publish
from benchmarks.lora_deployed import side_by_side
from benchmarks.lora_page import page
from benchmarks.lora_runs import QUICK, RATES, Run, Sizes, measure, pretrained, rounds_for

RULES = ("avg", "residual", "svd", "stack", "ffa", "alternate")
#: Rules that are also run with fewer bits, at Flower's rounds.
LEAN, EXTREME = ("avg", "svd", "alternate"), ("avg", "svd")
#: Rounds and steps of a run on real processes.
DEPLOYED = (5, 80)


def all_runs(sizes: Sizes) -> list[Run]:
    """Every run for the losses, those of one seed together."""
    runs = []
    for seed in range(sizes.seeds):
        runs.append(Run("flower", False, "fp32", sizes.rounds, seed))
        runs += [Run(rule, False, "lean", sizes.rounds, seed) for rule in LEAN]
        runs += [
            Run(rule, mixed, "safe", rounds_for(rule, sizes), seed)
            for rule in RULES
            for mixed in (False, True)
        ]
        runs += [Run(rule, False, "extreme", sizes.rounds, seed) for rule in EXTREME]
    return runs


def in_processes(
    kept: Kept, sizes: Sizes, real: Path | None
) -> tuple[Path, list[dict[str, Any]], dict[str, Any] | None]:
    """Base, runs and the real model's parts; as many at a time as there are cores."""
    spawn = multiprocessing.get_context("spawn")
    cores = os.cpu_count() or 1
    with (
        ProcessPoolExecutor(cores, mp_context=spawn) as processes,
        ThreadPoolExecutor(cores) as threads,
    ):

        def wait_for(key: str, work: Callable[..., Any], *words: Any) -> Future[Any]:
            return threads.submit(
                kept.get, key, lambda: processes.submit(work, *words).result()
            )  # fmt: skip

        base = processes.submit(pretrained, sizes)
        parts = {
            name: wait_for(f"{name} {json.dumps(lora_real.FORM)}", lora_real.part, name, str(real))
            for name in (lora_real.TOGETHER, lora_real.ALONE)
            if real is not None
        }  # fmt: skip
        model = base.result()
        runs = all_runs(sizes)
        waiting = [
            wait_for(
                f"{run.key} {sizes} {RATES[run.rule]}", measure, run, sizes.steps, str(model)
            )
            for run in runs
        ]  # fmt: skip
        found = [
            asdict(run) | each.result() for run, each in zip(runs, waiting, strict=True)
        ]  # fmt: skip
        together = {name: each.result() for name, each in parts.items()}
    return model, found, together | {"form": lora_real.FORM} if together else None


def main(quick: bool, resume: bool) -> dict[str, Any]:
    """Measure and publish."""
    sizes, name = (QUICK, "lora-quick") if quick else (Sizes(), "lora")
    kept = Kept(f"{name}-runs", resume)
    model, runs, real = in_processes(kept, sizes, None if quick else lora_real.folder())
    rounds, steps = DEPLOYED
    figures: dict[str, Any] = {
        "base": (
            "llama-nano (1.3 M parameters), pretrained a little by DiLoCo on the four shipped "
            f"corpora ({sizes.base_rounds} rounds of {sizes.base_steps} steps), is the base."
        ),
        "runs": runs, "steps": sizes.steps, "rounds": {r: rounds_for(r, sizes) for r in RULES},
        "deployed": None if quick else kept.get(
            f"deployed {rounds} {steps} {sizes}", lambda: side_by_side(model, rounds, steps)
        ),
        "real": real,
    }  # fmt: skip
    publish(name, "Federated LoRA", page(figures), figures)
    return figures


if __name__ == "__main__":
    main("--quick" in sys.argv, "--resume" in sys.argv)
