"""Metrics of runs that never happened, with the shape and the troubles of real ones."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PARAMETERS = 1_312_896
SEQ_LEN, BATCH_SIZE, INNER_STEPS = 128, 8, 20
NAMES = ("Charité Berlin", "Mayo Clinic", "Universitätsspital Zürich", "AIIMS Delhi")
DATA = ("corpus:sotu", "corpus:shakespeare", "corpus:darwin", "corpus:federalist")
BEGAN = 1_790_000_000.0


def fake_events(
    *,
    sites: int = 4,
    rounds: int = 24,
    names: Iterable[str] | None = None,
    troubles: bool = True,
    ended: str | None = "completed",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Events of a DiLoCo run: held-out loss falls from 8.3, sites differ, things break.

    With ``troubles``: a late answer, a refusal, a site that goes missing for some
    rounds, and a restart of the coordinator half-way.  ``ended=None`` leaves the
    run going.
    """
    rng = random.Random(seed)
    known = list(names) if names is not None else list(NAMES[:sites])
    known += [f"hospital-{i:02d}" for i in range(len(known) + 1, sites + 1)]
    clock = BEGAN
    events: list[dict[str, Any]] = []

    def log(event: str, after: float = 0.0, /, **keys: Any) -> None:
        nonlocal clock
        clock += after
        events.append({"event": event, **keys, "time": round(clock, 3)})

    def start(incarnation: int, resumed_from: int | None) -> None:
        log(
            "start",
            run="four-institutions",
            incarnation=incarnation,
            strategy="DiLoCo",
            rounds=rounds,
            resumed_from=resumed_from,
            model="gpt2-nano",
            parameters=PARAMETERS,
            sites=known,
            inner_steps=INNER_STEPS,
            codec_up="topk(density=0.03,chunk=4096)|int8(block=256)",
            codec_down="int8(block=256)",
            seq_len=SEQ_LEN,
            batch_size=BATCH_SIZE,
        )

    def held_out(site: int, round_: float) -> float:
        return 5.4 + 0.25 * site % 1.1 + 2.9 * math.exp(-round_ / 9) + rng.gauss(0, 0.012)

    def evaluate(round_: int) -> None:
        losses = [held_out(i, round_) for i in range(len(known))]
        for i, (name, loss) in enumerate(zip(known, losses, strict=True)):
            data = DATA[i % len(DATA)]
            log("eval", 0.2, round=round_, site=name, loss=loss, tokens=4096, data=data)
        log("eval", round=round_, site="*", loss=sum(losses) / len(losses), tokens=4096 * sites)

    def status_of(site: int, round_: int) -> tuple[str, str | None]:
        if not troubles or len(known) < 2:
            return "accepted", None
        if site == 1 and round_ in (5, 6, 7):
            return "missing", "no answer by the deadline"
        if site == 2 and round_ == 9:
            return "late", "answered 41 s after the round had closed"
        if site == 3 and round_ == 12:
            return "refused", "update norm 48.1 is 31 times the running median"
        return "accepted", None

    start(1, None)
    evaluate(0)
    for round_ in range(1, rounds + 1):
        if troubles and rounds > 4 and round_ == rounds // 2 + 1:
            clock += 75
            start(2, round_ - 1)
        taken = 31 + rng.random() * 4
        answered, up, down, losses = 0, 0, 0, []
        for i, name in enumerate(known):
            status, reason = status_of(i, round_)
            gone = status == "missing"
            loss = held_out(i, round_) + 0.05
            up_now, down_now = 0 if gone else rng.randint(61_000, 66_000), 1_336_000
            log(
                "site",
                taken / (len(known) + 1),
                round=round_,
                attempt=1,
                site=name,
                node=1000 + i,
                status=status,
                reason=reason,
                train_loss=None if gone else loss,
                loss_before=None if gone else held_out(i, round_ - 1),
                loss_after=None if gone else held_out(i, round_ - 0.5) - 0.12,
                tokens=0 if gone else INNER_STEPS * BATCH_SIZE * SEQ_LEN,
                steps=0 if gone else INNER_STEPS,
                seconds=None if gone else taken * (0.6 + 0.1 * (i % 4)),
                bytes_up=up_now,
                bytes_down=down_now,
                codec_up="topk(density=0.03,chunk=4096)|int8(block=256)",
                codec_down="int8(block=256)",
                update_norm=None if gone else 1.5 + rng.random() / 10,
                data=DATA[i % len(DATA)],
            )
            up, down = up + up_now, down + down_now
            if status == "accepted":
                answered += 1
                losses.append(loss)
            if gone and round_ == 5:
                log("fault", round=round_, site=name, what="site lost", detail="node went offline")
            if status == "refused":
                log("fault", round=round_, site=name, what="reply refused", detail=reason)
        tokens = answered * INNER_STEPS * BATCH_SIZE * SEQ_LEN
        log(
            "round",
            taken / (len(known) + 1),
            round=round_,
            attempt=1,
            asked=len(known),
            accepted=answered,
            train_loss=sum(losses) / len(losses),
            tokens=tokens,
            tokens_per_second=tokens / taken,
            seconds=taken,
            seconds_wait=taken - 0.4,
            seconds_fold=0.3,
            seconds_commit=0.1,
            bytes_up=up,
            bytes_down=down,
            hash="5f" * 32,
        )
        evaluate(round_)
    if ended is not None:
        log(
            "end",
            1.0,
            status=ended,
            reason=None if ended == "completed" else "only 1 of 4 sites answered in 3 attempts",
            rounds=rounds,
            seconds=clock - BEGAN,
            sample="The state of the Union is a great and\nand a just people, <b>all</b>",
            model_dir="runs/four-institutions/model",
        )
    return events


CONFIG: dict[str, Any] = {
    "run-name": "four-institutions",
    "rounds": 24,
    "seed": 0,
    "model": "gpt2-nano",
    "tokenizer": "builtin",
    "data": "builtin",
    "seq-len": SEQ_LEN,
    "batch-size": BATCH_SIZE,
    "inner-steps": INNER_STEPS,
    "inner-lr": 0.001,
    "outer-lr": 0.9,
    "outer-momentum": 0.5,
    "codec-up": "topk(density=0.03,chunk=4096)|int8(block=256)",
    "codec-down": "int8(block=256)",
    "quorum": 0.75,
    "deadline": 600,
    "max-staleness": 2,
    "eval-every": 1,
    "checkpoint-keep": 3,
}


def write_run(folder: Path, events: Iterable[dict[str, Any]], *, config: Any = CONFIG) -> Path:
    """Lay out a run folder with these events; NaN stays NaN, as a foreign writer might leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
