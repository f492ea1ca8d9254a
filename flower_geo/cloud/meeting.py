"""Where the sites of a round and the cloud's half go on together.  Pure; reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["Meeting"]


class Meeting:
    """Sites that are to begin, or to go on, at one step.

    Each says from which steps it can go on; 0, the round's begin, is always one.

    Args:
        sites: who is waited for.
        deadline: seconds after the first one's arrival that the others are waited for.
    """

    def __init__(self, sites: Iterable[str], deadline: float) -> None:
        self.sites = frozenset(sites)
        self.deadline = deadline
        self.steps: dict[str, frozenset[int]] = {}
        self._first: float | None = None

    def arrive(self, site: str, steps: Sequence[int], now: float) -> None:
        """A site is here; one that comes again says anew what it has."""
        if self._first is None:
            self._first = now
        self.steps[site] = frozenset({0, *steps})

    def leave(self, site: str) -> None:
        """A site that had arrived is gone again."""
        self.steps.pop(site, None)
        if not self.steps:
            self._first = None

    def ready(self, now: float) -> bool:
        """Whether everybody is here, or has been waited for long enough."""
        if not self.steps or self._first is None:
            return False
        return self.steps.keys() >= self.sites or now - self._first >= self.deadline

    def missing(self) -> frozenset[str]:
        """Who is not here."""
        return self.sites - self.steps.keys()

    def step(self, own: Iterable[int]) -> int:
        """The newest step that all who are here and the cloud can go on from."""
        common = frozenset({0, *own})
        for steps in self.steps.values():
            common &= steps
        return max(common)
