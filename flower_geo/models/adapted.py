"""A base model with a run's adapter on it, as every place that trains it needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flower_geo.config import FedAvgLoRAConfig
from flower_geo.models.adapter import attach
from flower_geo.models.adapter_choice import adapter_tokenizer
from flower_geo.models.adapter_spec import AdapterSpec
from flower_geo.models.identity import base_identity
from flower_geo.models.identity_text import identity_text
from flower_geo.models.quantise import load_base
from flower_geo.models.state import check_vocab

__all__ = ["Adapted", "adapted_base"]


@dataclass(frozen=True)
class Adapted:
    """What :func:`adapted_base` makes.

    Attributes:
        model: the adapter on its frozen base.
        tokenizer: the run's.
        identity: hashes of base and tokenizer as one text.
    """

    model: Any
    tokenizer: Any
    identity: str


def adapted_base(
    config: FedAvgLoRAConfig,
    spec: AdapterSpec,
    tokenizer: Callable[[str], Any],
    chat_template: Callable[[Any], str],
    device: str = "cpu",
) -> Adapted:
    """Load or build the base that a configuration names, and put an adapter on it.

    Args:
        config: names model, tokenizer, seed and lengths.
        spec: the adapter's shape here.
        tokenizer: loads one by its name or folder.
        chat_template: of a tokenizer.
        device: where a quantised base is put; another one stays on the CPU.

    Raises:
        ModelError: the model cannot be had, or the adapter not be put on it.
    """
    words = adapter_tokenizer(config.model, config.tokenizer, tokenizer)
    shape: dict[str, Any] = {
        "seed": config.seed, "vocab_size": len(words), "max_seq_len": config.seq_len,
    }  # fmt: skip
    base = load_base(config.model, quantise=config.quantise, device=device, **shape)
    check_vocab(base, words)
    identity = base_identity(
        config.model, words, chat_template=chat_template(words),
        model=base if config.quantise == "none" else None, **shape,
    )  # fmt: skip
    return Adapted(attach(base, spec, config.seed), words, identity_text(identity))
