"""Time-balanced rounds: each site takes as many steps as fit the time of the fastest.

Speeds come from the committed replies only (steps over seconds, smoothed), and
the numbers of steps are settled when a round is committed.  So tries of one
round ask the same, and a coordinator that resumes asks what it would have asked.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flower_geo.config import CommonConfig
from flower_geo.resilience import RoundOutcome, SiteRecord

__all__ = ["Balance"]

#: Share of the newest measurement in a site's speed.
FRESH = 0.5
#: Rounds after which a site that was not folded holds no others back.
RECENT = 8


@dataclass
class _Speed:
    """A site's speed in steps a second, and when it was last measured.

    ``own``: the site takes its own number of steps (node-config), whatever it is asked.
    """

    value: float
    round: int
    own: bool = False


class Balance:
    """Steps a round by site; without ``balance = "time"`` it only passes on.

    Args:
        config: the run's configuration.
        state: what :meth:`state` gave, from the checkpoint; None at the beginning.
    """

    def __init__(self, config: CommonConfig, state: Mapping[str, Any] | None = None) -> None:
        self.on = config.balance == "time"
        self.most = config.inner_steps
        self._speeds: dict[str, _Speed] = {}
        self._round = 0
        if state is not None:
            self._speeds = {name: _Speed(**entry) for name, entry in state["speeds"].items()}
            self._round = int(state["round"])

    def steps(self, site: str) -> int:
        """Steps ``site`` is asked for: ``inner-steps`` for the fastest, at least 1.

        A site nobody has measured yet, and one that takes its own number of steps, is
        asked for ``inner-steps``.
        """
        mine = self._speeds.get(site)
        if not self.on or mine is None or mine.own:
            return self.most
        fastest = max(
            [
                each.value
                for each in self._speeds.values()
                if not each.own and each.round > self._round - RECENT
            ],
            default=mine.value,
        )
        return min(self.most, max(1, math.floor(self.most * mine.value / fastest)))

    def config_for(self, record: SiteRecord | None, config: CommonConfig) -> CommonConfig:
        """``config`` as one site is to see it.

        Warm-up shrinks with the steps: it ends at the same share of the run.
        """
        steps = self.most if record is None else self.steps(record.name)
        if steps == config.inner_steps:
            return config
        warmup = round(config.warmup_steps * steps / config.inner_steps)
        return config.model_copy(update={"inner_steps": steps, "warmup_steps": warmup})

    def settle(self, outcome: RoundOutcome, done: int) -> None:
        """Learn from the replies of the round that is being committed as the ``done``-th."""
        if not self.on:
            return
        asked = {reply.meta.site: self.steps(reply.meta.site) for reply in outcome.replies}
        for reply in outcome.replies:
            site, metrics = reply.meta.site, reply.meta.metrics
            steps, seconds = metrics.get("steps", 0.0), metrics.get("seconds", 0.0)
            if steps <= 0 or seconds <= 0:
                continue
            speed, before = steps / seconds, self._speeds.get(site)
            own = before.own if before is not None else False
            if reply.meta.staleness == 0:
                own = steps != asked[site]
            if before is not None:
                speed = FRESH * speed + (1 - FRESH) * before.value
            self._speeds[site] = _Speed(speed, done, own)
        self._round = done

    def state(self) -> dict[str, Any] | None:
        """JSON state for the checkpoint."""
        if not self.on:
            return None
        speeds = {name: asdict(self._speeds[name]) for name in sorted(self._speeds)}
        return {"round": self._round, "speeds": speeds}
