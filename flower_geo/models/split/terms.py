"""What both halves of a cut model must be told alike before they train together."""

from __future__ import annotations

import hashlib
from typing import Any

from flower_geo.config import SplitConfig
from flower_geo.models.adapter_choice import adapter_spec

__all__ = ["split_terms"]


def split_terms(config: SplitConfig, identity: str, model: Any) -> dict[str, str]:
    """Terms of a stream, by name, as one side has them.

    Args:
        config: the run's, as this side was given it.
        identity: of the base model and tokenizer, see ``models.identity_text``.
        model: this side's model or part of it, for what the machine chose.
    """
    inner = model.config
    parts = dict(part.split("=", 1) for part in identity.split(","))
    return {
        **{f"model {name}": value for name, value in sorted(parts.items())},
        "adapter": hashlib.sha256(repr(adapter_spec(config)).encode()).hexdigest()[:12],
        "cut": f"{config.cut_bottom}+{config.cut_top} of {inner.num_hidden_layers}",
        "mode": config.mode,
        "codec-activations": config.codec_activations,
        "codec-gradients": config.codec_gradients,
        "delta-coding": str(config.delta_coding).lower(),
        "attention": str(inner._attn_implementation),
        "precision": config.precision,
        "micro-batches": str(config.grad_accum),
    }
