"""Plays faults on a run, one after the other, at moments a seed decides."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.checker import Findings, check_ended, check_run
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.stage import Stage

__all__ = ["Played", "Strike", "deck", "play"]

#: Seconds until the next commit after which the run counts as stuck.
STUCK = 420.0
#: Times a run that ended badly is started again by hand.
BY_HAND = 3


@dataclass
class Strike:
    """One fault and what came of it.

    Attributes:
        target, what: the fault.
        hit: whether there was something to do it to.
        round: rounds committed before it.
        seconds: from the fault to the next commit, or to the end of a run that
            had committed all; None when neither came.
        lost: committed rounds whose journal line was gone afterwards.
        by_hand: times the run ended badly and was started again.
    """

    target: str
    what: str
    hit: bool = False
    round: int = 0
    seconds: float | None = None
    lost: int = 0
    by_hand: int = 0


@dataclass
class Played:
    """One run and its checks."""

    seed: int
    database: bool
    strikes: list[Strike] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    repeated: int = 0
    replayed: int = 0
    retrained: int = 0
    seconds: float = 0.0

    def json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def deck(seed: int, *, slow: bool) -> Iterator[Fault]:
    """All faults, shuffled, again and again."""
    rng = random.Random(seed)
    while True:
        cards = [fault for fault in FAULTS if slow or not fault.slow]
        rng.shuffle(cards)
        yield from cards


def play(
    folder: Path, seed: int, faults: Sequence[Fault], *, rounds: int = 0, sites: int = 3,
    database: bool = False, say: Callable[[str], None] = lambda line: None,
) -> Played:  # fmt: skip
    """One run under the faults, then all checks.

    Args:
        folder: a new folder for everything.
        seed: of moments and choices, and of the run.
        faults: done in this order, each after the commit that followed the last.
        rounds: of the run; two more than faults by default.
        sites: SuperNodes.
        database: the SuperLink has a memory on disk.
        say: takes a line a fault.
    """
    rng, played, began = random.Random(seed), Played(seed, database), time.monotonic()
    stage = Stage(
        folder, sites=sites, rounds=rounds or len(faults) + 2, seed=seed, database=database,
        settings={"max-staleness": 2 * (seed // 2 % 2)},  # late replies are folded, or not
    )  # fmt: skip
    seen = b""
    with stage:
        stage.submit()
        # Before it is taken, a run that cannot be submitted is refused at once: as it should be.
        _wait(stage.submitted, 120.0)
        for fault in faults:
            time.sleep(rng.uniform(0.0, 8.0))
            if _over(stage) == 0:
                break
            strike = Strike(fault.target, fault.what, round=stage.commits())
            before, at, clock = stage.journal(), time.monotonic(), time.time()
            strike.hit = fault.apply(stage, rng)
            if strike.hit:
                _until(stage, strike, at, lambda n=strike.round: stage.commits() > n)  # type: ignore[misc]
                # A fault takes its time, and the commit may have come within it.
                if (committed := stage.committed_at(strike.round)) is not None:
                    strike.seconds = max(committed - clock, 0.0)
            after = stage.journal()
            strike.lost = 0 if after.startswith(before) else before.count(b"\n")
            seen = max(seen, after, key=len)
            played.strikes.append(strike)
            say(_line(seed, strike))
        ending = Strike("", "")
        _until(stage, ending, time.monotonic(), lambda: False)
        if _over(stage) != 0:
            played.problems.append(f"the run did not come to its end (code {_over(stage)})")
        played.notes = stage.notes
    hit = {strike.what for strike in played.strikes if strike.hit}
    findings = Findings()
    if (stage.run_folder / "journal.jsonl").exists():
        findings = check_run(
            stage.run_folder, folder / "kept", seen, stage.nodes(),
            flipped="flip checkpoint" in hit, forgot="flip generation" in hit,
        )  # fmt: skip
    else:
        played.problems.append("there is no journal")
    played.problems += findings.problems + check_ended(stage)
    played.repeated, played.replayed = findings.repeated, findings.replayed
    played.retrained = findings.retrained
    played.seconds = time.monotonic() - began
    return played


def _wait(reached: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not reached() and time.monotonic() < deadline:
        time.sleep(0.1)


def _over(stage: Stage) -> int | None:
    """Exit code of the supervisor, None while it is at it."""
    return stage.run.poll() if stage.run is not None else None


def _reason(stage: Stage) -> str:
    log = (stage.folder / "run.log").read_text(errors="replace").splitlines()
    return next((line for line in reversed(log) if line.startswith("error: ")), "no word")


def _until(stage: Stage, strike: Strike, at: float, reached: Callable[[], bool]) -> None:
    """Wait until something is reached or the run has completed; start again what ended badly."""
    deadline = time.monotonic() + STUCK
    while time.monotonic() < deadline:
        code = _over(stage)
        if reached() or code == 0:
            strike.seconds = time.monotonic() - at
            return
        if code is not None:
            if strike.by_hand == BY_HAND:
                return
            strike.by_hand += 1
            stage.notes.append(
                f"flower-geo run ended with code {code} and was started again: {_reason(stage)}"
            )
            time.sleep(2.0)
            stage.submit()
        stage.tend()
        time.sleep(0.05)


def _line(seed: int, strike: Strike) -> str:
    if not strike.hit:
        return f"seed {seed}  {strike.target:<11} {strike.what:<16} nothing there to do it to"
    went = "STUCK" if strike.seconds is None else f"next commit after {strike.seconds:6.1f} s"
    more = f", started again by hand {strike.by_hand} times" if strike.by_hand else ""
    return (
        f"seed {seed}  {strike.target:<11} {strike.what:<16} in round {strike.round + 1}: {went}, "
        f"committed rounds lost: {strike.lost}{more}"
    )
