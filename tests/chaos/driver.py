"""Plays faults on a run, one after the other, at moments a seed decides."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.chaos.checker import Findings, check_ended, check_run
from tests.chaos.faults import AMONG_OTHERS, FAULTS, PARTS, Fault, kill
from tests.chaos.stage import Stage

__all__ = ["Played", "Strike", "Volley", "deck", "play", "volleys"]

#: Seconds until the next commit after which the run counts as stuck.
STUCK = 420.0
#: Seconds a volley looks for parts that are not there.
VOLLEY = 45.0
#: Times a run that ended badly is started again by hand.
BY_HAND = 3


@dataclass(frozen=True)
class Volley:
    """Parts that are killed within seconds of each other.

    What is killed later may be what just recovers from the kill before.
    """

    parts: tuple[str, ...]


@dataclass
class Strike:
    """One fault and what came of it.

    Attributes:
        target, what: the fault.
        at: when it began, Unix seconds.
        hit: whether there was something to do it to.
        round: rounds committed before it.
        seconds: from the fault to the next commit, or to the end of a run that
            had committed all; None when neither came.
        lost: committed rounds whose journal line was gone afterwards.
        by_hand: times the run ended badly and was started again.
    """

    target: str
    what: str
    at: float = 0.0
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

    @property
    def kills(self) -> int:
        """Kills that hit something."""
        return sum(strike.hit and strike.what.startswith("kill -9") for strike in self.strikes)

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


def volleys() -> Iterator[Volley]:
    """Every part within seconds, again and again; the run's seed decides the order."""
    while True:
        yield Volley(PARTS)


def play(
    folder: Path, seed: int, faults: Sequence[Fault | Volley], *, rounds: int = 0, sites: int = 3,
    database: bool = False, say: Callable[[str], None] = lambda line: None,
    over: Callable[[Played], bool] = lambda played: False,
) -> Played:  # fmt: skip
    """One run under the faults, then all checks.

    Args:
        folder: a new folder for everything.
        seed: of moments and choices, and of the run.
        faults: done in this order, each after the commit that followed the last.
        rounds: of the run; two more than faults by default, and one more a volley.
        sites: SuperNodes.
        database: the SuperLink has a memory on disk.
        say: takes a line a fault.
        over: of what was done so far, says that no further fault is wanted.
    """
    rng, played, began = random.Random(seed), Played(seed, database), time.monotonic()
    usual = len(faults) + sum(isinstance(fault, Volley) for fault in faults) + 2
    stage = Stage(
        folder, sites=sites, rounds=rounds or usual, seed=seed, database=database,
        settings={"max-staleness": 2 * (seed // 2 % 2)},  # late replies are folded, or not
    )  # fmt: skip
    seen = b""
    with stage:
        stage.submit()
        # Before it is taken, a run that cannot be submitted is refused at once: as it should be.
        _wait(stage.submitted, 120.0)
        for fault in faults:
            time.sleep(rng.uniform(0.0, 8.0))
            if _over(stage) == 0 or over(played):
                break
            if isinstance(fault, Volley):
                strikes = _volley(stage, fault, rng)
            else:
                strikes = [
                    _strike(stage, fault.target, fault.what, partial(fault.apply, stage, rng))
                ]
            _await_commit(stage, strikes)
            seen = max(seen, stage.journal(), key=len)
            played.strikes += strikes
            for strike in strikes:
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


def _strike(stage: Stage, target: str, what: str, apply: Callable[[], bool]) -> Strike:
    """Do one fault and look at once whether the journal is what it was, or more."""
    strike = Strike(target, what, round=stage.commits(), at=time.time())
    before = stage.journal()
    strike.hit = apply()
    strike.lost = _gone(before, stage.journal())
    return strike


def _volley(stage: Stage, volley: Volley, rng: random.Random) -> list[Strike]:
    """Kill parts within seconds of each other, those of sites at one site.

    Each time one of those that are there.  A SuperNode, which takes its ClientApp and
    worker with it, comes after these.
    """
    site, strikes, left = rng.randrange(len(stage.cluster.supernodes)), list[Strike](), volley.parts
    # Where a run only begins there is little to kill: single faults see to that.
    _wait(lambda: bool(stage.pids("serverapp", site) and stage.pids("worker", site)), 2 * VOLLEY)
    deadline = time.monotonic() + VOLLEY
    while left and _over(stage) != 0:
        late = time.monotonic() >= deadline
        there = [part for part in left if stage.pids(part, site)]
        ready = there if late or not {"clientapp", "worker"} & {*left} else [
            part for part in there if part != "supernode"
        ]  # fmt: skip
        if ready:
            part = rng.choice(ready)
            left = tuple(each for each in left if each != part)
            one = partial(kill, stage, rng, part, site)
            strikes.append(_strike(stage, part, AMONG_OTHERS, one))
            time.sleep(rng.uniform(0.0, 2.0))
        elif late:
            break
        else:
            time.sleep(0.05)
    return strikes


def _await_commit(stage: Stage, strikes: Sequence[Strike]) -> None:
    """Wait for a commit after the last of the faults, and note what each of them cost."""
    hit = [strike for strike in strikes if strike.hit]
    if not hit:
        return
    before, last = stage.journal(), hit[-1]
    _until(stage, last, time.monotonic(), lambda: stage.commits() > last.round)
    lost = _gone(before, stage.journal())
    for strike in hit:
        strike.lost = max(strike.lost, lost)
        # A fault takes its time, and the commit may have come within it.
        if (committed := stage.committed_at(strike.round)) is not None:
            strike.seconds = max(committed - strike.at, 0.0)
        elif last.seconds is not None:  # the run was over: all was committed already
            strike.seconds = time.time() - strike.at


def _gone(before: bytes, after: bytes) -> int:
    """Journal lines that stood there before and do not any more."""
    return 0 if after.startswith(before) else before.count(b"\n")


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
