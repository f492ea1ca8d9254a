"""What went into a run's model, for its card: sites, rounds, tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flower_geo.resilience import RoundOutcome

__all__ = ["Tally"]


class Tally:
    """Counts over the committed rounds; part of a checkpoint, so that a resumed run goes on.

    Args:
        state: of a checkpoint.
    """

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        known = state or {}
        self.sites: set[str] = {str(name) for name in known.get("sites", ())}
        self.replies = int(known.get("replies", 0))
        self.tokens = float(known.get("tokens", 0.0))
        self.examples = float(known.get("examples", 0.0))

    def add(self, outcome: RoundOutcome) -> None:
        """Count the replies that a round was made of."""
        for reply in outcome.replies:
            metrics = reply.meta.metrics
            self.sites.add(reply.meta.site)
            self.replies += 1
            self.tokens += metrics.get("tokens", 0.0)
            self.examples += metrics.get("examples", 0.0)

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "sites": sorted(self.sites), "replies": self.replies, "tokens": self.tokens,
            "examples": self.examples,
        }  # fmt: skip

    def facts(self) -> dict[str, Any]:
        """For a model card: how many sites, never which."""
        return {
            "sites": len(self.sites), "updates folded in": self.replies,
            "tokens trained on": int(self.tokens), "examples trained on": int(self.examples),
        }  # fmt: skip
