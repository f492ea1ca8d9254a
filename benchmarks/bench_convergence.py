"""DiLoCo on real processes against data-parallel training with the same tokens.

DiLoCo: ``flower-geo run apps/diloco`` in simulation, four sites, 1024 tokens a
step at each, H local steps a round.  Data-parallel: one process that takes the
same number of steps, each on the four sites' batches with averaged gradients.
Both see the same text, the same shuffles, the same schedule and the same
held-out parts.

    python -m benchmarks.bench_convergence            # 400, 800 and 1600 steps, about an hour
    python -m benchmarks.bench_convergence --short    # 400 steps, about half of it

Each run is kept in ``artefacts/bench/convergence-runs.json`` as soon as it has
ended: with ``--resume`` an interrupted benchmark goes on from there.
"""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from benchmarks.figures import Kept, publish, run_python, simulate, table

SITES, EVAL_TOKENS = 4, 32_768


@dataclass(frozen=True)
class Setting:
    """One DiLoCo run."""

    name: str
    steps: int = 400
    inner_steps: int = 20
    codec_up: str = "int8(block=256)"
    codec_down: str = "int8(block=256)"
    outer_lr: float = 0.9
    outer_momentum: float = 0.5
    inner_lr: float = 1e-3


DEFAULT = "int8 both ways (default)"
FAST = 3e-3  # at which data-parallel training gains and every difference shows
BASE = (
    Setting(DEFAULT),
    Setting("int8 both ways", inner_lr=FAST),
    Setting("fp32 both ways", codec_up="fp32", codec_down="fp32", inner_lr=FAST),
    Setting("int4 up, int8 down", codec_up="int4(block=64)", inner_lr=FAST),
    Setting("int8, H=10", inner_steps=10, inner_lr=FAST),
    Setting("int8, outer 0.7/0.9", outer_lr=0.7, outer_momentum=0.9, inner_lr=FAST),
)
COURSE = (Setting(DEFAULT, 800), Setting(DEFAULT, 1600))

DATA_PARALLEL = """
import json, sys, torch
torch.set_num_threads(1)
from flower_geo.data import BatchSource, Cursor, data_spec, load_tokenizer, prepare
from flower_geo.models import build_model
from flower_geo.site.identity import cache_folder
from flower_geo.training import InnerConfig, InnerLoop, evaluate
steps, lr, eval_tokens, sites = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), 4
tokenizer = load_tokenizer()
model = build_model("gpt2-nano", seed=0, vocab_size=len(tokenizer), max_seq_len=128)
corpora = [prepare(data_spec("builtin", {}, i, sites), tokenizer, seq_len=128,
                   cache_dir=cache_folder({})) for i in range(sites)]
sources = [BatchSource(c.train, 8, Cursor(len(c.train), 0)) for c in corpora]
turn = iter(int(i) % sites for i in range(steps * sites))
# Gradient accumulation over the sites' batches is the averaged gradient.
loop = InnerLoop(model, InnerConfig(lr=lr, warmup_steps=20, total_steps=steps, schedule="cosine",
                                    grad_accum=sites))
loop.run(lambda: sources[next(turn)].next(), steps=steps, position=0, span=steps)
losses = [evaluate(model, c.held_out, 8, max_tokens=eval_tokens) for c in corpora]
print(json.dumps({"loss": sum(l.loss_sum for l in losses) / sum(l.tokens for l in losses),
                  "by_site": [l.loss for l in losses]}))
"""


def diloco(setting: Setting) -> dict[str, Any]:
    """Run DiLoCo in simulation and read its metrics."""
    values = {
        "rounds": setting.steps // setting.inner_steps, "inner-steps": setting.inner_steps,
        "inner-lr": setting.inner_lr, "eval-every": 0, "eval-tokens": EVAL_TOKENS,
        "codec-up": setting.codec_up, "codec-down": setting.codec_down,
        "outer-lr": setting.outer_lr, "outer-momentum": setting.outer_momentum,
        "sample-tokens": 0,
    }  # fmt: skip
    events = simulate(SITES, values)
    rounds = [event for event in events if event["event"] == "round"]
    losses = [event for event in events if event["event"] == "eval" and event["site"] == "*"]
    parameters = next(event["parameters"] for event in events if event["event"] == "start")
    return {
        "loss": losses[-1]["loss"], "start": losses[0]["loss"],
        "up": sum(r["bytes_up"] for r in rounds), "down": sum(r["bytes_down"] for r in rounds),
        "fp32_fedavg": len(rounds) * SITES * parameters * 4,
    }  # fmt: skip


def data_parallel(steps: int, lr: float) -> dict[str, Any]:
    """Train on all sites' batches with averaged gradients."""
    found: dict[str, Any] = run_python(DATA_PARALLEL, str(steps), str(lr), str(EVAL_TOKENS))
    return found


def main(course: bool, resume: bool) -> list[dict[str, Any]]:
    """Measure and publish."""
    kept = Kept("convergence-runs", resume)
    settings = BASE[:1] + (COURSE if course else ()) + BASE[1:]
    pairs = sorted({(setting.steps, setting.inner_lr) for setting in settings}, reverse=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # each is a process with one thread
        losses = pool.map(
            lambda pair: kept.get(f"data-parallel {pair}", lambda: data_parallel(*pair)), pairs
        )
        baseline = dict(zip(pairs, losses, strict=True))
    rows = []
    for setting in settings:
        found = kept.get(json.dumps(asdict(setting)), partial(diloco, setting))
        pair = setting.steps, setting.inner_lr
        rows.append(asdict(setting) | found | {"data_parallel": baseline[pair]["loss"]})
    render(rows)
    return rows


def render(rows: list[dict[str, Any]]) -> None:
    """Publish the rows as a table."""
    cells = [
        [
            row["name"], f"{row['inner_lr']:g}", row["steps"], row["inner_steps"], row["loss"],
            row["data_parallel"], 100 * (row["loss"] / row["data_parallel"] - 1),
            row["up"] / 1e6, row["down"] / 1e6,
            (row["up"] + row["down"]) / (2 * row["fp32_fedavg"]),
        ]
        for row in rows
    ]  # fmt: skip
    headings = [
        "DiLoCo", "inner lr", "steps a site", "H", "held-out loss", "data-parallel", "gap, %",
        "MB up", "MB down", "of fp32 FedAvg's bytes",
    ]  # fmt: skip
    text = (
        "gpt2-nano (1.3 M parameters), four sites with one corpus each, 1024 tokens a step and "
        "site, inner AdamW with a cosine schedule, H local steps a round; the loss starts at "
        f"{rows[0]['start']:.2f}. Losses are held-out, over all four corpora; both see the same "
        "tokens under the same inner learning rate. Bytes are payload of all sites; fp32 FedAvg "
        "sends every weight in fp32 both ways every round.\n\n"
        + table(headings, cells)
        + "\n\nRecommended for short runs, up to some thousand steps a site, by the rows of 400 "
        "steps: outer learning rate 0.9 with momentum 0.5, H of 10 to 20, inner learning rate "
        "1e-3, int8 both ways; these are the defaults of apps/diloco. The usual 0.7 with momentum "
        "0.9, made for runs of hundreds of rounds, ends higher here.\n"
    )
    publish("convergence", "DiLoCo against data-parallel training with the same tokens", text, rows)


if __name__ == "__main__":
    main("--short" not in sys.argv, "--resume" in sys.argv)
