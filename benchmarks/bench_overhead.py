"""Time a round takes beside the training itself, in simulation on a machine of its own.

As many sites train at a time as there are cores; what is left of a round is
what this project and Flower add: messages, coding, folding, commit.
"""

from __future__ import annotations

import os
from statistics import median
from typing import Any

from benchmarks.figures import publish, simulate, table

SITES, ROUNDS = 4, 8
CODECS = ("fp32", "int8(block=256)")


def measure(codec: str) -> dict[str, float]:
    """Medians over the rounds after the first, which starts the sites' processes."""
    values: dict[str, Any] = {
        "rounds": ROUNDS, "eval-every": 0, "codec-up": codec, "codec-down": codec,
        "sample-tokens": 0,
    }  # fmt: skip
    events = simulate(SITES, values)
    # The last round carries the last evaluation, the first one the start of all processes.
    rounds = [e for e in events if e["event"] == "round" and 1 < e["round"] < ROUNDS]
    at_work = {
        number: sum(e.get("seconds") or 0.0 for e in events
                    if e["event"] == "site" and e["round"] == number)
        for number in (e["round"] for e in rounds)
    }  # fmt: skip
    cores = min(SITES, os.cpu_count() or 1)
    return {
        "round": median(e["seconds"] for e in rounds),
        "outside": median(e["seconds"] - at_work[e["round"]] / cores for e in rounds),
        "fold": median(e["seconds_fold"] for e in rounds),
        "commit": median(e["seconds_commit"] for e in rounds),
    }


def main() -> dict[str, dict[str, float]]:
    """Measure and publish."""
    found = {codec: measure(codec) for codec in CODECS}
    rows = [[codec, *row.values()] for codec, row in found.items()]
    publish(
        "overhead", "Time outside training",
        f"gpt2-nano, {SITES} sites with H=20 steps of 1024 tokens, medians of rounds 2 to "
        f"{ROUNDS - 1} of a simulation, in seconds.\n\n"
        + table(
            ["codec both ways", "a round", "of it outside training", "fold", "wait for the commit"],
            rows,
        ),
        found,
    )  # fmt: skip
    return found


if __name__ == "__main__":
    main()
