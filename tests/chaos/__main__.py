"""``python -m tests.chaos --minutes 30``: chaos for so long, then a table and its figures.

Two lanes at once, each one run after another.  In the one every fault there is, one at
a time, so that it is known what each of them costs.  In the other kills only, all parts
within seconds, so that there are many.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.figures import output_folder, table
from tests.chaos.driver import Played, Strike, Volley, deck, play, volleys
from tests.chaos.faults import Fault, named

#: Of the second lane's runs: other seeds than the first lane's.
KILLS_SEED = 1000


def main() -> int:
    """Play runs until the time is up; exit 1 when a check failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1, help="of the first run")
    parser.add_argument("--faults", type=int, default=6, help="faults or volleys a run")
    parser.add_argument(
        "--kills", type=int, help="the lane of kills goes on until so many, for up to as long "
        "again; 100 in half an hour",
    )  # fmt: skip
    parser.add_argument("--only", action="append", help="such as 'superlink:kill -9'; one lane")
    parser.add_argument("--quick", action="store_true", help="no fault that takes a minute")
    parser.add_argument("--lane", choices=("both", "matrix", "kills"), default="both")
    parser.add_argument("--part", action="store_true", help="somebody else writes chaos.json")
    parser.add_argument(
        "--keep", action="store_true", help="keep the folders of runs that went badly"
    )
    chosen = parser.parse_args()
    # Told to end, it ends what it has started.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if chosen.only or chosen.lane != "both":
        runs = _lane(chosen, chosen.lane if not chosen.only else "matrix")
        return 1 if any(run.problems for run in runs) else 0
    _of_lane("kills").unlink(missing_ok=True)  # of an earlier call
    command = [sys.executable, "-m", "tests.chaos", *sys.argv[1:], "--lane", "kills", "--part"]
    with subprocess.Popen(command) as other:
        try:
            runs = _lane(chosen, "matrix")
            other.wait()
        finally:
            other.terminate()
    runs += _read("kills")
    _store(runs)
    print("\n" + _text(runs))
    return 1 if any(run.problems for run in runs) or other.returncode else 0


def _lane(chosen: argparse.Namespace, lane: str) -> list[Played]:
    """Runs, one after the other, until the time is up."""
    began, runs = time.monotonic(), list[Played]()
    wanted = 0
    if lane == "kills":
        wanted = round(chosen.minutes * 100 / 30) if chosen.kills is None else chosen.kills

    def over(*more: Played) -> bool:
        share = (time.monotonic() - began) / (60 * chosen.minutes)
        return share >= 2 or (share >= 1 and sum(run.kills for run in (*runs, *more)) >= wanted)

    seed = chosen.seed + (KILLS_SEED if lane == "kills" else 0)
    singles, threes = deck(seed, slow=not chosen.quick), volleys()
    cards: Iterator[Fault | Volley] = threes if lane == "kills" else singles
    while not over():
        faults: list[Fault | Volley] = [named(name) for name in chosen.only or ()]
        played = _played(
            seed, faults or [next(cards) for _ in range(chosen.faults)], chosen.keep, over
        )
        runs.append(played)
        seed += 1
        _of_lane(lane).write_text(json.dumps([run.json() for run in runs], indent=1))
        if not chosen.part:
            both = chosen.lane == "both" and not chosen.only
            _store(runs + (_read("kills") if both else []))
    return runs


def _played(
    seed: int, faults: list[Fault | Volley], keep: bool, over: Callable[[Played], bool]
) -> Played:
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    played = play(folder / "stage", seed, faults, database=seed % 2 == 0, say=_say, over=over)
    for problem in played.problems:
        _say(f"seed {seed}  PROBLEM: {problem}")
    for note in played.notes:
        _say(f"seed {seed}  note: {note}")
    _say(f"seed {seed}  {played.replayed} rounds replayed, {played.retrained} replies trained "
         f"again, {len(played.problems)} problems, {played.seconds:.0f} s")  # fmt: skip
    if keep and (played.problems or any(strike.by_hand for strike in played.strikes)):
        _say(f"seed {seed}  kept in {folder}")
    else:
        shutil.rmtree(folder)
    return played


def _of_lane(lane: str) -> Path:
    return output_folder() / f"chaos-{lane}.json"


def _read(lane: str) -> list[Played]:
    """The other lane's runs, as far as it has come."""
    try:
        stored = json.loads(_of_lane(lane).read_text())
    except (OSError, ValueError):
        return []
    return [
        Played(**{**run, "strikes": [Strike(**strike) for strike in run["strikes"]]})
        for run in stored
    ]


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


def _text(runs: list[Played]) -> str:
    headings = ["target", "fault", "times", "what happened", "committed rounds lost",
                "seconds to the next commit: median", "worst"]  # fmt: skip
    cells = []
    for row in summary([strike for run in runs for strike in run.strikes]):
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
    strikes = [strike for run in runs for strike in run.strikes if strike.hit]
    record = {
        "name": "chaos", "title": "Chaos: what happens when a part dies",
        "text": _text(runs), "command": "make chaos", "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "figures": {
            "matrix": summary(strikes), "runs": [run.json() for run in runs],
            "faults": len(strikes),
            "kills": sum(run.kills for run in runs),
            "lost": sum(strike.lost for strike in strikes),
            "replayed": sum(run.replayed for run in runs),
            "retrained": sum(run.retrained for run in runs),
            "problems": [problem for run in runs for problem in run.problems],
        },
    }  # fmt: skip
    (output_folder() / "chaos.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    sys.exit(main())
