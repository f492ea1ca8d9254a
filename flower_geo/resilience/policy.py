"""When a round ends and what it brought; how the layers tell what happens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from flower_geo.resilience.spool import SpooledReply

__all__ = ["Emit", "RoundOutcome", "RoundPolicy"]


class Emit(Protocol):
    """Takes one event of the metrics log."""

    def __call__(self, event: str, /, **values: Any) -> None:
        """Record ``event``."""


@dataclass(frozen=True)
class RoundPolicy:
    """When a round ends and what it needs.

    Attributes:
        quorum_of: good replies, out of so many asked, that end the round early.
        deadline: seconds after which the round ends with what there is.
        min_sites: good replies without which it is not committed.
        max_staleness: rounds a late reply may be behind and still be folded.
        wait_for_sites: seconds to wait for ``min_sites`` to connect.
        strict_start: bad input at any site stops a run that has not begun.
        weight_by: ``tokens``, ``examples`` or ``equal``.
    """

    quorum_of: Callable[[int], int]
    deadline: float = 3600.0
    min_sites: int = 1
    max_staleness: int = 0
    wait_for_sites: float = 120.0
    strict_start: bool = True
    weight_by: str = "tokens"


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
