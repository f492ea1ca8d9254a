"""Adaptive choice: measured speeds and a target in, a codec a site and round out.

Pure: it reads no clock and sends nothing, and the same observations in the same
order give the same choices.  Its state is JSON and goes into the checkpoint, so
that a resumed run chooses as the undisturbed one would have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import Any

import torch

from flower_geo.compression.link import JITTER, Link
from flower_geo.compression.spec import chain, codec
from flower_geo.errors import CodecSpecError

__all__ = ["ADAPTIVE", "AdaptiveChoice", "Budget", "encoded_bytes", "ladder"]

#: Takes the place of a codec's spec where the ladder is to be used.
ADAPTIVE = "adaptive"
#: Values encoded to learn how many bytes a codec takes.
SAMPLE = 1 << 16
#: A rung less compressed must take at most this share of the target, two rounds in
#: a row; at most the second share and it is taken at once.
COMFORT, CLEAR = 0.8, 0.5
PATIENCE = 2
#: Good rounds that a step up takes at most, after steps that had to be undone.
LONGEST_WAIT = 32


def ladder(text: str) -> tuple[str, ...]:
    """Read ``"bf16 > int8(block=256) > int4(block=64)"``: specs, least compressed first.

    Raises:
        CodecSpecError: fewer than two rungs, one twice, or one that is no spec.
    """
    rungs = []
    for place, part in enumerate(text.split(">"), start=1):
        try:
            rungs.append(codec(part.strip()).spec)
        except CodecSpecError as error:
            raise CodecSpecError(f"rung {place} of the ladder: {error}") from None
    if len(rungs) < 2:
        raise CodecSpecError(
            f"the ladder {text[:60]!r} has no rung to step to; write two codecs or more, "
            "least compressed first: 'int8(block=256) > int4(block=64)'"
        )
    twice = [spec for spec in rungs if rungs.count(spec) > 1]
    if twice:
        raise CodecSpecError(f"the ladder holds {twice[0]} twice; leave one out")
    return tuple(rungs)


def encoded_bytes(spec: str, shapes: Mapping[str, Sequence[int]]) -> int:
    """About how many bytes a model of these shapes takes under ``spec``.

    Up to 65536 normal values a size are encoded and the rest is reckoned, so codecs
    whose size depends on the values (zstd) are met about right.

    Raises:
        CodecSpecError: ``spec`` cannot be read, or has no rule for a tensor.
    """
    chosen = codec(spec)
    return sum(
        _size(chosen.for_tensor(name).spec, math.prod(shape)) for name, shape in shapes.items()
    )


@lru_cache(maxsize=4096)
def _size(spec: str, count: int) -> int:
    taken = min(count, SAMPLE)
    sample = torch.randn(taken, generator=torch.Generator().manual_seed(0)) * 1e-3
    encoded = len(chain(spec).encode(sample))
    return encoded if taken == count else round(encoded * count / taken)


@dataclass(frozen=True)
class Budget:
    """What communication may take: seconds a round, or a share of the round's time."""

    seconds: float | None = None
    share: float | None = None

    @classmethod
    def read(cls, text: str) -> Budget:
        """Read ``"10"`` (seconds) or ``"20%"`` (of a round's time).

        Raises:
            ValueError: it is neither.
        """
        number = float(text.strip().removesuffix("%"))
        return cls(share=number / 100) if text.strip().endswith("%") else cls(seconds=number)

    def each_way(self, work: float | None) -> float | None:
        """Seconds for one direction (half of the whole), None while not known.

        Args:
            work: seconds a site works a round.
        """
        if self.seconds is not None:
            return self.seconds / 2
        if self.share is None or not work:
            return None
        # comm / (comm + work) = share
        return self.share / (1 - self.share) * work / 2


@dataclass
class _Place:
    """Where someone stands on the ladder, by spec: the ladder may be another one after a resume.

    Attributes:
        good: rounds in a row in which the rung above would have done.
        rose: the last move went up, a round ago.
        patience: good rounds a step up takes; doubled by each one undone at once.
    """

    rung: str
    good: int = 0
    why: str = ""
    rose: bool = False
    patience: int = PATIENCE


@dataclass
class _Site:
    link: Link = field(default_factory=Link)
    work: float | None = None
    seen: bool = False
    missed: bool = False


class AdaptiveChoice:
    """The codecs of a run's sites and of its broadcasts.

    Call :meth:`observe` and :meth:`missed` for what a round brought, then
    :meth:`settle` once; :meth:`up` and :attr:`down` hold until the next one.

    Args:
        rungs: specs, least compressed first, from :func:`ladder`.
        budget: what communication may take, half of it each way.
        shapes: the model's tensors.
        quantile: share of the slowest sites the broadcast's codec does not wait for.

    Raises:
        CodecSpecError: a rung sends more than the one before it.
    """

    def __init__(
        self,
        rungs: Sequence[str],
        budget: Budget,
        shapes: Mapping[str, Sequence[int]],
        quantile: float = 0.0,
    ) -> None:
        self.rungs = tuple(rungs)
        self.budget = budget
        self.quantile = quantile
        self.sizes = [encoded_bytes(spec, shapes) for spec in self.rungs]
        for place in range(1, len(self.rungs)):
            if self.sizes[place] > self.sizes[place - 1]:
                raise CodecSpecError(
                    f"the ladder steps from {self.rungs[place - 1]} to {self.rungs[place]}, which "
                    f"sends more ({self.sizes[place]} against {self.sizes[place - 1]} bytes); "
                    "order it least compressed first"
                )
        self._sites: dict[str, _Site] = {}
        self._up: dict[str, _Place] = {}
        self._down: _Place | None = None

    # -- what is known ----------------------------------------------------------

    def greet(
        self, site: str, seconds: float, up: float | None = None, down: float | None = None
    ) -> None:
        """A site's greeting: its empty round trip, and speeds given by hand (bytes a second)."""
        link = self._sites.setdefault(site, _Site()).link
        link.empty(seconds)
        link.declared = [up, down]

    def observe(self, site: str, up: float, down: float, seconds: float, work: float) -> None:
        """A site's reply: bytes either way, seconds on the way, seconds at work."""
        known = self._sites.setdefault(site, _Site())
        known.link.observe(up, down, seconds)
        known.seen = True
        if math.isfinite(work) and work > 0:
            work = round(work, 3)
            known.work = work if known.work is None else known.work + 0.5 * (work - known.work)

    def missed(self, site: str) -> None:
        """A connected site was asked and brought nothing before the round ended."""
        self._sites.setdefault(site, _Site()).missed = True

    def speeds(self, site: str) -> tuple[float | None, float | None]:
        """Bytes a second up and down, as far as known."""
        link = self._sites.get(site, _Site()).link
        return link.speed(0), link.speed(1)

    # -- what is chosen ---------------------------------------------------------

    def up(self, site: str) -> str:
        """Spec for a site's updates."""
        return self._at(site).rung

    @property
    def down(self) -> str:
        """Spec for the broadcasts."""
        return self.rungs[len(self.rungs) // 2] if self._down is None else self._down.rung

    def why(self, site: str | None = None) -> str:
        """Why the last :meth:`settle` changed a site's codec, or the broadcasts' (None); or ""."""
        place = self._down if site is None else self._up.get(site)
        return "" if place is None else place.why

    def _at(self, site: str) -> _Place:
        """A site's place; a new one begins in the middle, or where speeds by hand put it."""
        place = self._up.get(site)
        if place is None:
            place = self._up[site] = self._begin(self._load(site, 0, by_hand=True))
        return place

    def _begin(self, load: float | None) -> _Place:
        if load is None:
            return _Place(self.rungs[len(self.rungs) // 2])
        fitting = (spec for spec, n in zip(self.rungs, self.sizes, strict=True) if n * load <= 1)
        return _Place(next(fitting, self.rungs[-1]), why="speeds given by hand")

    def settle(self, sites: Iterable[str] = ()) -> None:
        """Take at most one step for every site that was heard of, and for the broadcasts.

        Args:
            sites: sites the next broadcast is for; all known ones by default.
        """
        for name, known in sorted(self._sites.items()):
            place = self._at(name)
            place.why = ""
            if known.missed and not known.seen:
                self._move(place, 1, "no reply before the round ended")
            elif known.seen:
                self._step(place, self._load(name, 0))
            known.seen = known.missed = False
        names = sorted(sites) or sorted(self._sites)
        if self._down is None:
            given = [self._load(name, 1, by_hand=True) for name in names]
            load = self._slowest(given) if None not in given else None
            self._down = self._begin(load)
        else:
            self._down.why = ""
        self._step(self._down, self._slowest([self._load(name, 1) for name in names]))

    def _load(self, site: str, way: int, by_hand: bool = False) -> float | None:
        """Share of a direction's budget that one byte takes at a site."""
        known = self._sites.get(site, _Site())
        if by_hand and known.link.declared[way] is None:
            return None
        seconds, budget = known.link.least(way, 1.0), self.budget.each_way(known.work)
        # Seconds that cannot be told from two polls' are no reason to compress.
        return None if seconds is None or budget is None else seconds / max(budget, JITTER)

    def _slowest(self, loads: Iterable[float | None]) -> float | None:
        found = sorted((load for load in loads if load is not None), reverse=True)
        return found[min(int(self.quantile * len(found)), len(found) - 1)] if found else None

    def _step(self, place: _Place, load: float | None) -> None:
        if load is None or place.rung not in self.rungs:
            return
        at = self.rungs.index(place.rung)
        now = self.sizes[at] * load
        if now > 1:
            place.good = 0
            place.patience = min(2 * place.patience, LONGEST_WAIT) if place.rose else place.patience
            self._move(place, 1, f"{place.rung} takes {now:.2g} of its time")
            return
        if place.rose:
            place.rose, place.patience = False, PATIENCE
        before = self.sizes[at - 1] * load if at else math.inf
        place.good = place.good + 1 if before <= COMFORT else 0
        clear = before <= CLEAR and place.patience == PATIENCE
        if place.good and (clear or place.good >= place.patience):
            place.good = 0
            self._move(place, -1, f"{self.rungs[at - 1]} takes {before:.2g} of its time")

    def _move(self, place: _Place, by: int, why: str) -> None:
        at = self.rungs.index(place.rung) + by
        if 0 <= at < len(self.rungs):
            place.rung, place.why, place.rose = self.rungs[at], why, by < 0

    # -- checkpoints ------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON state, as of the last :meth:`settle`."""
        return {
            "sites": {name: asdict(known) for name, known in sorted(self._sites.items())},
            "up": {name: asdict(place) for name, place in sorted(self._up.items())},
            "down": None if self._down is None else asdict(self._down),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave; places on rungs that are gone are left."""
        self._sites = {
            name: _Site(**{**known, "link": Link(**known["link"])})
            for name, known in state["sites"].items()
        }
        self._up = {
            name: _Place(**place)
            for name, place in state["up"].items()
            if place["rung"] in self.rungs
        }
        down = state["down"]
        self._down = None if down is None or down["rung"] not in self.rungs else _Place(**down)
