"""``python -m tests.chaos --minutes 30``: chaos for so long, then a table and its figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.figures import output_folder, table
from tests.chaos.driver import Played, Strike, deck, play
from tests.chaos.faults import named


def main() -> int:
    """Play runs until the time is up; exit 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--faults", type=int, default=5, help="faults a run")
    parser.add_argument("--only", action="append", help="such as 'superlink:kill -9'")
    parser.add_argument("--quick", action="store_true", help="no fault that takes a minute")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folders of runs that went badly"
    )
    chosen = parser.parse_args()
    # Told to end, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    cards = deck(chosen.seed, slow=not chosen.quick)
    until, seed, runs = time.monotonic() + 60 * chosen.minutes, chosen.seed, list[Played]()
    while time.monotonic() < until:
        faults = [named(n) for n in chosen.only or ()] or [
            next(cards) for _ in range(chosen.faults)
        ]
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        played = play(folder / "stage", seed, faults, database=seed % 2 == 0, say=_say)
        runs.append(played)
        for problem in played.problems:
            _say(f"seed {seed}  PROBLEM: {problem}")
        for note in played.notes:
            _say(f"seed {seed}  note: {note}")
        _say(f"seed {seed}  {played.replayed} rounds replayed, {len(played.problems)} problems, "
             f"{played.seconds:.0f} s")  # fmt: skip
        if chosen.keep and (played.problems or any(s.by_hand for s in played.strikes)):
            _say(f"seed {seed}  kept in {folder}")
        else:
            shutil.rmtree(folder)
        seed += 1
        _store(runs)
    print("\n" + _table([strike for run in runs for strike in run.strikes]))
    return 1 if any(run.problems for run in runs) else 0


def _say(line: str) -> None:
    print(line, flush=True)


def summary(strikes: list[Strike]) -> list[dict[str, Any]]:
    """A row for each target and fault."""
    cells: dict[tuple[str, str], list[Strike]] = defaultdict(list)
    for strike in strikes:
        if strike.hit:
            cells[strike.target, strike.what].append(strike)
    rows = []
    for (target, what), done in sorted(cells.items()):
        seconds = sorted(s.seconds for s in done if s.seconds is not None)
        rows.append(
            {
                "target": target, "fault": what, "times": len(done),
                "lost": sum(s.lost for s in done), "stuck": len(done) - len(seconds),
                "by_hand": sum(s.by_hand for s in done),
                "median_seconds": seconds[len(seconds) // 2] if seconds else None,
                "worst_seconds": seconds[-1] if seconds else None,
            }
        )  # fmt: skip
    return rows


def _table(strikes: list[Strike]) -> str:
    headings = ["target", "fault", "times", "what happened", "committed rounds lost",
                "seconds to the next commit: median", "worst"]  # fmt: skip
    cells = []
    for row in summary(strikes):
        happened = "the run went on"
        if row["by_hand"]:
            happened = f"ended with a reason, went on when run again ({row['by_hand']} times)"
        if row["stuck"]:
            happened = f"stuck {row['stuck']} times"
        cells.append([row["target"], row["fault"], row["times"], happened, row["lost"],
                      row["median_seconds"] or "-", row["worst_seconds"] or "-"])  # fmt: skip
    return table(headings, cells)


def _store(runs: list[Played]) -> None:
    """The figures so far, in the shape that ``benchmarks/write_docs.py`` reads."""
    strikes = [strike for run in runs for strike in run.strikes]
    record = {
        "name": "chaos", "title": "Chaos: what happens when a part dies",
        "text": _table(strikes), "command": "make chaos", "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "figures": {
            "matrix": summary(strikes), "runs": [run.json() for run in runs],
            "faults": sum(strike.hit for strike in strikes),
            "lost": sum(strike.lost for strike in strikes),
            "problems": [problem for run in runs for problem in run.problems],
        },
    }  # fmt: skip
    (output_folder() / "chaos.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
