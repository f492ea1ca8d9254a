"""The presets of ``apps/diloco/presets`` against DiLoCo in fp32 at equal tokens.

Every run is the real strategy over four sites of the real site code, in one process
and without sockets (``tests/federation.py``): 100 rounds of 30 local steps of 256
tokens, seeds 0 to 2.  A seed decides the initial weights and the order of the data,
and the fp32 run it is compared with has the same one.

    python -m benchmarks.bench_presets            # nine CPU-minutes a run, 12 runs
    python -m benchmarks.bench_presets --seeds 1  # one seed
    python -m benchmarks.bench_presets --resume   # goes on where it was interrupted
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.figures import REPO, Kept, publish, run_python, table

SITES = 4
PRESETS = ("safe", "lean", "extreme")
COURSE = (20, 40, 60, 80, 100)
SETTINGS: dict[str, Any] = {
    "rounds": 100, "inner-steps": 30, "seq-len": 64, "batch-size": 4, "inner-lr": 2e-3,
    "warmup-steps": 50, "outer-lr": 0.9, "outer-momentum": 0.5, "eval-every": COURSE[0],
    "eval-tokens": 16_384, "sample-tokens": 0, "codec-up": "fp32", "codec-down": "fp32",
}  # fmt: skip

ONE = """
import sys
from benchmarks.bench_presets import one
one(sys.argv[1], int(sys.argv[2]))
"""


@dataclass(frozen=True)
class Run:
    """One run of a preset, or of ``fp32``."""

    preset: str
    seed: int


def settings(preset: str) -> dict[str, Any]:
    """Run configuration of a preset, or of ``fp32``."""
    from flower_geo.config import parse_overrides

    if preset == "fp32":
        return SETTINGS
    return SETTINGS | parse_overrides([str(REPO / "apps/diloco/presets" / f"{preset}.toml")])


def one(preset: str, seed: int) -> None:
    """Run in this process and print the losses by round and the bytes."""
    import torch

    from flower_geo.config import DiLoCoConfig, parse
    from flower_geo.observe import read_metrics
    from flower_geo.strategies import DiLoCo, initial_arrays
    from tests.federation import MemoryGrid, sites

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = parse(
            DiLoCoConfig, {**settings(preset), "seed": seed, "run-dir": f"{folder}/runs"}
        )
        grid = MemoryGrid(sites(SITES, f"{folder}/state"))
        DiLoCo(config).start(grid, initial_arrays(config))
        events = read_metrics(Path(config.run_dir) / config.run_name / "metrics.jsonl")
    rounds = [event for event in events if event["event"] == "round"]
    losses = {e["round"]: e["loss"] for e in events if e["event"] == "eval" and e["site"] == "*"}
    values = next(event["parameters"] for event in events if event["event"] == "start")
    print(
        json.dumps(
            {
                "loss": {str(round): losses[round] for round in (0, *COURSE)},
                "up": sum(r["bytes_up"] for r in rounds),
                "down": sum(r["bytes_down"] for r in rounds),
                "values": values * SITES * len(rounds),  # sent once each way, a round
            }
        )
    )


def main(seeds: int, resume: bool) -> None:
    """Measure and publish."""
    kept = Kept("presets-runs", resume)
    runs = [Run(name, seed) for seed in range(seeds) for name in ("fp32", *PRESETS)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process with one thread
        found = pool.map(
            lambda run: kept.get(
                f"{run.preset} {run.seed} {json.dumps(settings(run.preset))}",
                lambda: run_python(ONE, run.preset, str(run.seed), FLWR_TELEMETRY_ENABLED="0"),
            ),
            runs,
        )
        render(dict(zip(runs, found, strict=True)), seeds)


def _spread(values: list[float]) -> str:
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def render(found: dict[Run, Any], seeds: int) -> None:
    """Publish the gaps to fp32 over the course and the bytes."""
    rows = []
    for name in ("fp32", *PRESETS):
        ours = [found[Run(name, seed)] for seed in range(seeds)]
        base = [found[Run("fp32", seed)] for seed in range(seeds)]
        values = mean(run["values"] for run in ours)
        bits = [8 * mean(run[way] for run in ours) / values for way in ("up", "down")]
        course = [
            [100 * (o["loss"][str(at)] / b["loss"][str(at)] - 1)
             for o, b in zip(ours, base, strict=True)]
            for at in COURSE
        ]  # fmt: skip
        loss = _spread([run["loss"][str(COURSE[-1])] for run in ours])
        steps = SETTINGS["inner-steps"]
        cells = [name, *bits, 64 / sum(bits), 64 * steps / sum(bits), loss]
        rows.append([*cells, *(["-"] * len(COURSE) if name == "fp32" else map(_spread, course))])
    headings = [
        "preset", "bits up", "bits down", "fp32 FedAvg's bytes over ours",
        "fp32 gradients' bytes over ours", "held-out loss",
        *(f"gap at {at}, %" for at in COURSE),
    ]  # fmt: skip
    text = (
        "gpt2-nano (1.3 M parameters), four sites with one corpus each, 100 rounds of 30 local "
        "steps of 256 tokens, AdamW at 2e-3 with a cosine schedule, outer 0.9/0.5 unless the "
        "preset says otherwise. Bits are payload a value and round, headers and first snapshots "
        'included. "fp32 FedAvg" sends every weight in fp32 both ways every round, "fp32 '
        'gradients" a gradient up and a mean down in fp32 every step, for the same training. '
        "The gap is to DiLoCo in fp32 with the same seed after so many rounds; "
        f"mean of {seeds} seed{'s' if seeds > 1 else ''}"
        + (" (least to most)" if seeds > 1 else "")
        + ".\n\n"
        + table(headings, rows)
    )
    publish("presets", "Presets: bytes and loss", text, rows)


if __name__ == "__main__":
    count = int(sys.argv[sys.argv.index("--seeds") + 1]) if "--seeds" in sys.argv else 3
    main(count, "--resume" in sys.argv)
