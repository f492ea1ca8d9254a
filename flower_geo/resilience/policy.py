"""When a round ends and what it brought; how the layers tell what happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil
from typing import Any, Literal, Protocol

from flower_geo.resilience.spool import SpooledReply

__all__ = ["Emit", "RoundOutcome", "RoundPolicy"]


class Emit(Protocol):
    """Takes one event of the metrics log."""

    def __call__(self, event: str, /, **values: Any) -> None:
        """Record ``event``."""


@dataclass(frozen=True)
class RoundPolicy:
    """Whom a round asks, when it ends and what it needs.

    Attributes:
        quorum_of: good replies, out of so many needed, that end the round early.
        deadline: seconds after which the round ends with what there is.
        grace: seconds the round goes on for stragglers once the quorum is met.
        sites_of: sites a round needs, out of so many that are ready.
        over_provision: share of sites asked beyond those needed.
        seed: decides, with the round, whom a round asks among equals.
        min_sites: good replies without which it is not committed.
        max_staleness: rounds a late reply may be behind and still be folded.
        staleness_weight: what a late reply weighs: ``inverse`` = 1/(1+staleness) of its
            weight, ``equal`` = all of it, ``drop`` = nothing, it is never folded.
        wait_for_sites: seconds to wait for ``min_sites`` to connect.
        strict_start: bad input at any site stops a run that has not begun.
        weight_by: ``tokens``, ``examples`` or ``equal``.
    """

    quorum_of: Callable[[int], int]
    deadline: float = 3600.0
    grace: float = 0.0
    sites_of: Callable[[int], int] = lambda ready: ready
    over_provision: float = 0.0
    seed: int = 0
    min_sites: int = 1
    max_staleness: int = 0
    staleness_weight: Literal["inverse", "equal", "drop"] = "inverse"
    wait_for_sites: float = 120.0
    strict_start: bool = True
    weight_by: str = "tokens"

    def needed(self, ready: int) -> int:
        """Sites a round needs when so many are ready; ``min_sites`` where there are as many."""
        return min(ready, max(self.sites_of(ready), self.min_sites))

    def to_ask(self, ready: int) -> int:
        """Sites a round asks when so many are ready."""
        return min(ready, ceil(round(self.needed(ready) * (1 + self.over_provision), 6)))

    @property
    def oldest(self) -> int:
        """Rounds a late reply may be behind and still be worth waiting for."""
        return 0 if self.staleness_weight == "drop" else self.max_staleness

    def discount(self, staleness: int) -> float:
        """Share of its weight that a reply so many rounds late has in the mean."""
        return 1.0 / (1 + staleness) if self.staleness_weight == "inverse" else 1.0


@dataclass
class RoundOutcome:
    """What a round brought.

    Attributes:
        replies: accepted replies, in site order.
        asked: sites asked, those with a reply already spooled included.
        attempt: the try that brought it.
        bytes_up: payload bytes received, refused replies included.
        down: payload bytes sent, by site.
        norms: update norm by site.
    """

    replies: list[SpooledReply]
    asked: int
    attempt: int = 1
    bytes_up: int = 0
    down: dict[str, int] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)

    @property
    def bytes_down(self) -> int:
        """Payload bytes sent to all sites."""
        return sum(self.down.values())

    def sent(self, site: str, nbytes: int) -> None:
        """Count a payload."""
        self.down[site] = self.down.get(site, 0) + nbytes
