"""What may go wrong: each fault is done to one part, and mended as it would be in life."""

from __future__ import annotations

import errno
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.stage import Stage, start_member

__all__ = ["AMONG_OTHERS", "FAULTS", "PARTS", "Fault", "kill", "named", "pairs"]


@dataclass(frozen=True)
class Fault:
    """One cell of the matrix.

    Attributes:
        target: the part it is done to.
        what: the fault.
        apply: does it; returns False where there was nothing to do it to.
        slow: it takes a minute or more by itself.
    """

    target: str
    what: str
    apply: Callable[[Stage, random.Random], bool]
    slow: bool = False

    @property
    def name(self) -> str:
        return f"{self.target}:{self.what}"


def _find(
    stage: Stage, target: str, rng: random.Random, site: int | None = None, seconds: float = 45.0
) -> tuple[psutil.Process | None, int]:
    """A part and its site; it may take a moment until there is one."""
    sites = list(range(len(stage.cluster.supernodes))) if site is None else [site]
    rng.shuffle(sites)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for site in sites:
            for pid in stage.pids(target, site):
                with suppress(psutil.Error):
                    return psutil.Process(pid), site
        if stage.run is not None and stage.run.poll() is not None:
            break
        time.sleep(0.02)
    return None, 0


def kill(stage: Stage, rng: random.Random, target: str, at: int | None = None) -> bool:
    """Kill -9 a part, and start again what nothing else starts again.

    Args:
        stage: where.
        rng: decides the site, and for how long a part stays away.
        target: the part.
        at: its site; by default any that has one.
    """
    part, site = _find(stage, target, rng, at, 45.0 if at is None else 1.0)
    if part is None:
        return False
    away = rng.uniform(0.0, 3.0 if at is not None else 6.0)
    member = {
        "superlink": stage.cluster.superlink, "supernode": stage.cluster.supernodes[site],
    }.get(target)  # fmt: skip
    if member is not None:
        stage.down.add(member.name)
    with suppress(psutil.Error):
        part.kill()
    if member is not None:
        start_member(member, away)
        if target == "superlink":
            member.wait()
        stage.down.discard(member.name)
    elif target == "supervisor":
        assert stage.run is not None
        stage.run.wait()
        time.sleep(away)
        stage.attach()
    return True


def _kill(target: str) -> Callable[[Stage, random.Random], bool]:
    return lambda stage, rng: kill(stage, rng, target)


def _stop(target: str, seconds: float) -> Callable[[Stage, random.Random], bool]:
    """SIGSTOP for a while; a part that is ended meanwhile needs no going on."""

    def apply(stage: Stage, rng: random.Random) -> bool:
        part, _ = _find(stage, target, rng)
        if part is None:
            return False
        with suppress(psutil.Error):
            part.suspend()
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline and (stage.run is None or stage.run.poll() is None):
                time.sleep(0.2)
            part.resume()
        return True

    return apply


def _net(what: str, seconds: float) -> Callable[[Stage, random.Random], bool]:
    def apply(stage: Stage, rng: random.Random) -> bool:
        relay = rng.choice(stage.relays)
        if what == "reset":
            relay.reset()
            return True
        if what == "cut":
            relay.cut()
        elif what == "blackhole":
            relay.blackhole()
        else:
            relay.slow(delay=0.1, rate=60_000)
        time.sleep(seconds)
        relay.mend()
        return True

    return apply


def _flip_file(path: Path, rng: random.Random) -> bool:
    """One bit of a file becomes another, in a new file in the old one's place."""
    try:
        data = bytearray(path.read_bytes())
        if not data:
            return False
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        fresh = path.with_name(f"{path.name}-flipped")
        fresh.write_bytes(data)
        os.replace(fresh, path)
    except OSError:
        return False
    return True


def _flip(what: str) -> Callable[[Stage, random.Random], bool]:
    """A flipped bit is seen when somebody starts anew, so the ServerApp is killed after it."""

    def apply(stage: Stage, rng: random.Random) -> bool:
        state = stage.folder / "cluster"
        places: dict[str, Callable[[], list[Path]]] = {
            "checkpoint": lambda: sorted(stage.run_folder.glob("checkpoints/round-*/*"))[-5:],
            "spool": lambda: sorted(stage.run_folder.glob("spool/round-*/*/*")),
            "base": lambda: sorted(state.glob("site-*/state/chaos-*/*/base/*")),
            "generation": lambda: sorted(state.glob("site-*/state/chaos-*/*/gen-*/*")),
        }
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if what == "checkpoint" and stage.commits() < 2:
                time.sleep(0.1)  # the only one would be missed
                continue
            found = places[what]()
            if found and _flip_file(rng.choice(found), rng):
                if what in ("checkpoint", "spool"):
                    for pid in stage.pids("serverapp", 0):
                        with suppress(psutil.Error):
                            psutil.Process(pid).kill()
                return True
            time.sleep(0.02)
        return False

    return apply


def _fill_disk(stage: Stage, rng: random.Random) -> bool:
    """The run folder's disk is full for a while."""
    if not stage.small_disk:
        return False
    ballast = stage.runs / "ballast"
    deadline = time.monotonic() + rng.uniform(8.0, 16.0)
    try:
        with ballast.open("wb", buffering=0) as file:
            block = 1 << 20
            while time.monotonic() < deadline:
                try:
                    file.write(b"\0" * block)
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    block = max(block // 4, 1)
                    time.sleep(0.05)
    finally:
        ballast.unlink(missing_ok=True)
    return True


def _misbehave(how: str) -> Callable[[Stage, random.Random], bool]:
    def apply(stage: Stage, rng: random.Random) -> bool:
        who = "coordinator" if how == "duplicate" else rng.choice(stage.cluster.supernodes).name
        order = stage.folder / "misbehave" / who
        order.write_text(how)
        deadline = time.monotonic() + 90
        while order.exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        done = how == "duplicate" or not order.exists()
        order.unlink(missing_ok=True)
        return done

    return apply


#: Parts that can be killed and stopped.  A part that is not there is left out.
PARTS = ("worker", "clientapp", "supernode", "serverapp", "superlink", "supervisor")
#: Longer than Flower's two heartbeats.
LONG = 75.0

FAULTS: tuple[Fault, ...] = (
    *(Fault(part, "kill -9", _kill(part)) for part in PARTS),
    *(Fault(part, "stopped 5 s", _stop(part, 5.0)) for part in PARTS),
    *(Fault(part, f"stopped {LONG:.0f} s", _stop(part, LONG), slow=True) for part in PARTS),
    Fault("network", "reset", _net("reset", 0.0)),
    Fault("network", "cut 5 s", _net("cut", 5.0)),
    Fault("network", "blackhole 8 s", _net("blackhole", 8.0)),
    Fault("network", "slow 12 s", _net("slow", 12.0)),
    Fault("network", f"cut {LONG:.0f} s", _net("cut", LONG), slow=True),
    Fault("network", f"blackhole {LONG:.0f} s", _net("blackhole", LONG), slow=True),
    *(Fault("bits", f"flip {what}", _flip(what))
      for what in ("checkpoint", "spool", "base", "generation")),
    Fault("disk", "full", _fill_disk),
    *(Fault("reply", how, _misbehave(how))
      for how in ("nan", "spoilt", "hostile", "stale", "duplicate")),
)  # fmt: skip


#: A kill within a volley: others follow or precede it by seconds.
AMONG_OTHERS = "kill -9 among others"


def pairs() -> list[tuple[str, str]]:
    """Every target and fault the driver can do."""
    return [(f.target, f.what) for f in FAULTS] + [(part, AMONG_OTHERS) for part in PARTS]


def named(name: str) -> Fault:
    """The fault ``target:what``."""
    return next(fault for fault in FAULTS if fault.name == name)
