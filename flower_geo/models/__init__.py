"""Causal language models and LoRA adapters on them: built, loaded, measured, exported.

Importing this package imports neither transformers nor PEFT; the functions that need it
do, when they are called.
"""

from __future__ import annotations

from flower_geo.models.adapter import (
    adapter_parameters,
    adapter_state,
    attach,
    factors_of,
    load_adapter_state,
    lora_keys,
    set_trained,
)
from flower_geo.models.adapter_export import export_adapter, export_merged
from flower_geo.models.adapter_spec import AdapterSpec, spec_from_config
from flower_geo.models.build import build_model, parameter_count
from flower_geo.models.card import model_card
from flower_geo.models.export import export_model
from flower_geo.models.fold import fold
from flower_geo.models.gguf import gguf_tokenizer
from flower_geo.models.identity import base_identity, differing
from flower_geo.models.memory import MemoryEstimate, memory_estimate
from flower_geo.models.quantise import load_base
from flower_geo.models.sample import sample_text
from flower_geo.models.state import check_vocab, load_state, snapshot, trained_state
from flower_geo.models.table import MODELS, ModelSpec

__all__ = [
    "MODELS",
    "AdapterSpec",
    "MemoryEstimate",
    "ModelSpec",
    "adapter_parameters",
    "adapter_state",
    "attach",
    "base_identity",
    "build_model",
    "check_vocab",
    "differing",
    "export_adapter",
    "export_merged",
    "export_model",
    "factors_of",
    "fold",
    "gguf_tokenizer",
    "load_adapter_state",
    "load_base",
    "load_state",
    "lora_keys",
    "memory_estimate",
    "model_card",
    "parameter_count",
    "sample_text",
    "set_trained",
    "snapshot",
    "spec_from_config",
    "trained_state",
]
