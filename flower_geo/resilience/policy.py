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
        bytes_up, bytes_down: payload bytes received and sent.
        norms: update norm by site.
    """

    replies: list[SpooledReply]
    asked: int
    bytes_up: int = 0
    bytes_down: int = 0
    norms: dict[str, float] = field(default_factory=dict)
