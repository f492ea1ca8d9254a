"""``docs/faults.md``: every fault, what happens then, what is lost, and how long it took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.figures import table
from tests.chaos.words import NAMES, ORDER, WORDS

__all__ = ["chaos_page", "faults_section"]

_HEADINGS = (
    "fault", "what happens", "what is lost", "times", "committed rounds lost",
    "seconds to the next commit: median", "most",
)  # fmt: skip


def chaos_page(chaos: Mapping[str, Any]) -> str:
    """Every fault and what came of it, as Markdown.

    Args:
        chaos: what ``make chaos`` left in ``chaos.json``.

    Raises:
        ValueError: the chaos run found a broken promise, which is no figure to show.
    """
    figures = chaos["figures"]
    if figures["problems"]:
        raise ValueError(
            f"the chaos run has {len(figures['problems'])} problems, the first: "
            f"{figures['problems'][0]}; mend that, then run it again"
        )
    machine = f"Machine: {chaos['machine']}, Python {chaos['python']}.\n"
    return "\n".join(["# Faults\n", _summary(figures), *_matrix(figures), machine])


def faults_section(faults: Mapping[str, Any]) -> dict[str, str]:
    """Title and text of what ``benchmarks/bench_faults.py`` left in ``faults.json``."""
    return {
        faults["title"]: f"{faults['text']}\n\nMeasured by `python -m benchmarks.bench_faults`. "
        f"Machine: {faults['machine']}, Python {faults['python']}.\n"
    }


def _summary(figures: Mapping[str, Any]) -> str:
    runs = figures["runs"]
    return (
        f"Measured by `make chaos`: {figures['faults']} faults, {figures['kills']} of them kill "
        f"-9, in {len(runs)} runs of three sites under seeds {_seeds(runs)}, every part a process "
        f"of its own. Committed rounds lost: {figures['lost']}. After each run it was checked "
        "that the journal held every line seen before and was whole, that folding the same "
        f"replies again gave the same bits ({figures['replayed']} rounds), that sites trained "
        f"again without faults sent the same bytes ({figures['retrained']} replies) from data "
        "used once each, that sum decoded + residual = sum given at each site (since its state "
        "was damaged, where that was the fault), and that no process, port, lock or unfinished "
        "file was left.\n\n"
        "Training takes less than a second a round here: the seconds are those of Flower's "
        "messages, of noticing, and of starting again.\n"
    )


def _seeds(runs: list[Mapping[str, Any]]) -> str:
    """Such as ``1-4, 1001-1003``."""
    spans: list[list[int]] = []
    for seed in sorted(run["seed"] for run in runs):
        if spans and seed == spans[-1][1] + 1:
            spans[-1][1] = seed
        else:
            spans.append([seed, seed])
    return ", ".join(f"{low}-{high}" if low != high else str(low) for low, high in spans)


def _matrix(figures: Mapping[str, Any]) -> list[str]:
    """A table a target; what was not done stands there without figures."""
    done = {(row["target"], row["fault"]): row for row in figures["matrix"]}
    parts = []
    for target in ORDER:
        rows = []
        for (each, fault), words in WORDS.items():
            if each == target:
                found = done.get((target, fault))
                rows.append([fault, words.happens, words.lost, *_measured(found)])
        parts.append(f"## {NAMES[target][0].upper()}{NAMES[target][1:]}\n")
        parts.append(table(_HEADINGS, rows) + "\n")
        again = sum(done[key]["by_hand"] for key in done if key[0] == target)
        if again:
            parts.append(
                f"{again} times `flower-geo run` ended with its reason and was started again, as "
                "its last line says.\n"
            )
    return parts


def _measured(row: Mapping[str, Any] | None) -> list[Any]:
    if row is None:
        return [0, "-", "-", "-"]
    seconds = [row["median_seconds"], row["worst_seconds"]]
    return [row["times"], row["lost"], *("-" if s is None else f"{s:.1f}" for s in seconds)]
