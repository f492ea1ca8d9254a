"""One site's inner loop against the same training written down bare.

Both train the nano GPT-2 on the same batches with one thread.  They take turns
in one process, so that both see the same machine; the ratio is of medians.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from benchmarks.figures import publish, table
from flower_geo.data import BatchSource, Cursor, load_tokenizer, prepare
from flower_geo.models import build_model
from flower_geo.site.identity import cache_folder
from flower_geo.training import InnerConfig, InnerLoop

STEPS, TURNS, BATCH, LENGTH = 20, 9, 8, 128


def bare(model: nn.Module, source: BatchSource, steps: int) -> None:
    """A training loop as one writes it in a notebook."""
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}],
        lr=1e-3, betas=(0.9, 0.95), fused=True,
    )  # fmt: skip
    model.train()
    for _ in range(steps):
        batch = source.next()
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def main() -> float:
    """Measure and publish; return the ratio."""
    torch.set_num_threads(1)
    tokenizer = load_tokenizer()
    corpus = prepare("corpus:sotu", tokenizer, seq_len=LENGTH, cache_dir=cache_folder({}))

    def fresh() -> tuple[nn.Module, BatchSource]:
        model = build_model("gpt2-nano", seed=0, vocab_size=len(tokenizer), max_seq_len=LENGTH)
        return model, BatchSource(corpus.train, BATCH, Cursor(len(corpus.train), 0))

    config = InnerConfig(lr=1e-3, warmup_steps=0, total_steps=STEPS, schedule="constant")
    seconds: dict[str, list[float]] = {"bare": [], "flower_geo": []}
    for turn in range(TURNS + 1):
        for name in ("bare", "flower_geo"):
            model, source = fresh()
            began = time.perf_counter()
            if name == "bare":
                bare(model, source, STEPS)
            else:
                InnerLoop(model, config).run(source.next, steps=STEPS, position=0, span=STEPS)
            if turn:  # the first turn warms up
                seconds[name].append(time.perf_counter() - began)
    tokens = STEPS * BATCH * LENGTH
    speed = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    ratio = speed["flower_geo"] / speed["bare"]
    publish(
        "inner-loop", "Inner loop against a bare script",
        f"gpt2-nano, batch {BATCH} of {LENGTH} tokens, one thread, median of {TURNS} turns of "
        f"{STEPS} steps.\n\n"
        + table(
            ["", "tokens/s"],
            [["bare script", round(speed["bare"])], ["flower_geo", round(speed["flower_geo"])],
             ["ratio (at least 0.97 wanted)", ratio]],
        ),
        {"ratio": ratio, **speed},
    )  # fmt: skip
    return ratio


if __name__ == "__main__":
    main()
