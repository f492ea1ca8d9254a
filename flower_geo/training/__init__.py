"""Local training at a site: the inner loops, their schedules, held-out loss."""

from __future__ import annotations

from flower_geo.evaluation import (
    EvalResult,
    InstructionResult,
    Sequences,
    evaluate,
    evaluate_instructions,
    exact_match,
)
from flower_geo.evaluation.batch import Batch
from flower_geo.training.loop import InnerLoop
from flower_geo.training.schedule import InnerConfig, learning_rate
from flower_geo.training.sft import TrlLoop
from flower_geo.training.tally import InnerResult, RoundSoFar

__all__ = [
    "Batch",
    "EvalResult",
    "InnerConfig",
    "InnerLoop",
    "InnerResult",
    "InstructionResult",
    "RoundSoFar",
    "Sequences",
    "TrlLoop",
    "evaluate",
    "evaluate_instructions",
    "exact_match",
    "learning_rate",
]
