"""Aggregation of LoRA adapters as the updates they stand for."""

from __future__ import annotations

from flower_geo.aggregation.lora.factors import compact, norm, stacked, svd_order, truncate
from flower_geo.aggregation.lora.rules import RULES, Aggregate, Factors, aggregate

__all__ = [
    "RULES",
    "Aggregate",
    "Factors",
    "aggregate",
    "compact",
    "norm",
    "stacked",
    "svd_order",
    "truncate",
]
