"""Local training at a site: the inner loop, its schedules, held-out loss."""

from __future__ import annotations

from flower_geo.training.evaluation import EvalResult, Sequences, evaluate
from flower_geo.training.loop import InnerLoop
from flower_geo.training.schedule import InnerConfig, learning_rate
from flower_geo.training.tally import InnerResult, RoundSoFar

__all__ = [
    "EvalResult",
    "InnerConfig",
    "InnerLoop",
    "InnerResult",
    "RoundSoFar",
    "Sequences",
    "evaluate",
    "learning_rate",
]
