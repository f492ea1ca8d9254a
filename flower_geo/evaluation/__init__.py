"""How well a model does on data held out: pure functions that sites and coordinator share.

Nothing here trains, and nothing of the model changes.
"""

from __future__ import annotations

from flower_geo.evaluation.instructions import (
    InstructionResult,
    evaluate_instructions,
    exact_match,
)
from flower_geo.evaluation.text import EvalResult, Sequences, evaluate

__all__ = [
    "EvalResult",
    "InstructionResult",
    "Sequences",
    "evaluate",
    "evaluate_instructions",
    "exact_match",
]
