"""Our lean loop and TRL's trainer on the same adapter and the same batches.

Both train a LoRA adapter on a small Llama with one thread, and take turns in one
process.  Seconds are the processor's, which others on the machine do not
lengthen.  A round's fixed cost is what a round of one step takes beyond a step
of a long round, on one short row, whose steps cost little.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.figures import publish, table
from flower_geo.models import AdapterSpec, attach, build_model
from flower_geo.training import InnerConfig, InnerLoop, TrlLoop

STEPS, SHORT, TURNS, BATCH, LENGTH, VOCAB = 6, 6, 5, 4, 128, 8192
KINDS: dict[str, type[InnerLoop]] = {"lean": InnerLoop, "trl": TrlLoop}


def answers(
    share: float, rows: int = BATCH, length: int = LENGTH
) -> Callable[[], dict[str, Tensor]]:
    """Batches whose rows are prompts but for ``share`` of them at the end."""
    generator = torch.Generator().manual_seed(0)

    def batch() -> dict[str, Tensor]:
        ids = torch.randint(0, VOCAB, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, : length - int(share * length)] = -100
        return {"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}

    return batch


def measured(share: float, turns: int = TURNS) -> dict[str, dict[str, float]]:
    """Seconds to build, a step, and a round beyond its steps, of each loop."""
    config = InnerConfig(lr=1e-3, total_steps=1000, schedule="constant")
    loops: dict[str, InnerLoop] = {}
    found: dict[str, dict[str, Any]] = {kind: {"step": [], "fixed": []} for kind in KINDS}
    for kind in KINDS:
        base = build_model("llama-nano", seed=0, vocab_size=VOCAB, max_seq_len=LENGTH)
        model = attach(base, AdapterSpec(rank=8, alpha=16), seed=0)
        began = time.process_time()
        loops[kind] = KINDS[kind](model, config)
        found[kind]["build"] = time.process_time() - began
        loops[kind].run(answers(share), steps=2)  # warms up
    for _ in range(turns):
        for kind in KINDS:
            found[kind]["step"].append(_seconds(loops[kind], answers(share), STEPS) / STEPS)
            tiny = answers(1.0, rows=1, length=8)
            long = _seconds(loops[kind], tiny, SHORT) / SHORT
            short = sum(_seconds(loops[kind], tiny, 1) for _ in range(SHORT)) / SHORT
            # a round of n steps takes n s + f
            found[kind]["fixed"].append((short - long) * SHORT / (SHORT - 1))
    return {
        kind: {
            "build": values["build"], "step": statistics.median(values["step"]),
            "fixed": statistics.median(values["fixed"]),
        }
        for kind, values in found.items()
    }  # fmt: skip


def _seconds(loop: InnerLoop, source: Callable[[], dict[str, Tensor]], steps: int) -> float:
    began = time.process_time()
    loop.run(source, steps=steps)
    return time.process_time() - began


def main(quick: bool = False) -> dict[str, Any]:
    """Measure and publish; return the figures."""
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    rows = []
    for share in (0.5,) if quick else (1.0, 0.5, 0.1):
        found = measured(share, turns=1 if quick else TURNS)
        figures[f"{share:g}"] = found
        ratio = found["trl"]["step"] / found["lean"]["step"]
        for kind in KINDS:
            each = found[kind]
            rows.append(
                [
                    f"{share:.0%}", kind, 1e3 * each["step"], ratio if kind == "trl" else 1.0,
                    1e3 * each["fixed"], 1e3 * each["build"],
                ]
            )  # fmt: skip
    publish(
        "sft-loop-quick" if quick else "sft-loop", "The lean loop against TRL's trainer",
        f"A LoRA adapter of rank 8 on llama-nano, vocabulary {VOCAB}, batch {BATCH} of {LENGTH} "
        f"tokens, processor time of one thread, median of {TURNS} turns of {STEPS} steps. "
        "The first build of TRL's trainer holds its import.\n\n"
        + table(
            ["labels that count", "loop", "ms a step", "against lean", "ms a round beyond its "
             "steps", "ms to build"],
            rows,
        ),
        figures,
    )  # fmt: skip
    return figures


if __name__ == "__main__":
    main("--quick" in sys.argv)
