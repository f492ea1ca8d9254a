"""From replies on disk to one model: streaming means and outer optimisers."""

from __future__ import annotations

from flower_geo.aggregation.outer import OuterSGD
from flower_geo.aggregation.reducers import Contribution, weighted_mean

__all__ = ["Contribution", "OuterSGD", "weighted_mean"]
