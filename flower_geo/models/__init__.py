"""Causal language models: built, loaded, measured, exported.

Importing this package does not import transformers; the functions that need it
do, when they are called.
"""

from __future__ import annotations

from flower_geo.models.build import build_model, parameter_count
from flower_geo.models.export import export_model
from flower_geo.models.memory import MemoryEstimate, memory_estimate
from flower_geo.models.sample import sample_text
from flower_geo.models.state import check_vocab, load_state, snapshot, trained_state
from flower_geo.models.table import MODELS, ModelSpec

__all__ = [
    "MODELS",
    "MemoryEstimate",
    "ModelSpec",
    "build_model",
    "check_vocab",
    "export_model",
    "load_state",
    "memory_estimate",
    "parameter_count",
    "sample_text",
    "snapshot",
    "trained_state",
]
