"""When a round ends, as a configuration says."""

from __future__ import annotations

from flower_geo.config import CommonConfig
from flower_geo.resilience import RoundPolicy

__all__ = ["policy_of"]


def policy_of(config: CommonConfig) -> RoundPolicy:
    """The policy of a run."""
    return RoundPolicy(
        quorum_of=config.quorum_of, deadline=config.deadline, grace=config.grace,
        sites_of=config.sites_of, over_provision=config.over_provision, seed=config.seed,
        min_sites=config.min_sites, max_staleness=config.max_staleness,
        staleness_weight=config.staleness_weight, wait_for_sites=config.wait_for_sites,
        strict_start=config.strict_start, weight_by=config.weight_by,
    )  # fmt: skip
