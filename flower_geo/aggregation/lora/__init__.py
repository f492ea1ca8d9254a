"""LoRA adapters of several sites into one: by rules that are exact, or say how far off they are.

An adapter of rank r adds ``scale * B @ A`` to a frozen matrix [out, in], with
``B`` [out, r] and ``A`` [r, in].  What sites of weights p_i agree on is the mean
of those products, ``sum p_i scale_i B_i A_i``: its rank is the sum of theirs, and
the product of the mean factors is something else.  Nothing here forms a matrix of
shape [out, in], but for ``dense()``.
"""

from __future__ import annotations

from flower_geo.aggregation.lora.factors import Pair, SiteFactors
from flower_geo.aggregation.lora.lowrank import combine, compact, svd_order, truncate
from flower_geo.aggregation.lora.rules import RULES, Aggregate, aggregate

__all__ = [
    "RULES",
    "Aggregate",
    "Pair",
    "SiteFactors",
    "aggregate",
    "combine",
    "compact",
    "svd_order",
    "truncate",
]
