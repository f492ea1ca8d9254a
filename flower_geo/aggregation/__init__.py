"""From replies on disk to one model: streaming means, adapters and server optimizers."""

from __future__ import annotations

from flower_geo.aggregation.outer import OuterSGD
from flower_geo.aggregation.reducers import Contribution, shares, weighted_mean
from flower_geo.aggregation.server_optimizer import ServerOptimizer

__all__ = ["Contribution", "OuterSGD", "ServerOptimizer", "shares", "weighted_mean"]
