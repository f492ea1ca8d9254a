"""The cloud's half of a cut model, as the configuration names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flower_geo.config import SplitConfig
from flower_geo.data import load_tokenizer
from flower_geo.data.instructions import chat_template_of
from flower_geo.models import attach, base_identity, check_vocab, load_base
from flower_geo.models.adapter_choice import adapter_spec, adapter_tokenizer
from flower_geo.models.identity_text import identity_text
from flower_geo.models.split import Cut, SplitPart, split_part
from flower_geo.models.split.terms import split_terms

__all__ = ["Half", "built_half"]


@dataclass(frozen=True)
class Half:
    """The middle with its adapter, and what a site must have alike.

    Attributes:
        part: the middle.
        names: of the whole adapted model's trained parameters, in its order.
        terms: for the handshake.
    """

    part: SplitPart
    names: tuple[str, ...]
    terms: dict[str, str]


def built_half(config: SplitConfig) -> Half:
    """Build or load the base, put the adapter on, and keep the middle.

    Raises:
        ModelError: the model cannot be had, or not be cut there.
    """
    words = adapter_tokenizer(config.model, config.tokenizer, load_tokenizer)
    base: Any = load_base(
        config.model, seed=config.seed, vocab_size=len(words), max_seq_len=config.seq_len
    )
    check_vocab(base, words)
    identity = base_identity(
        config.model, words, seed=config.seed, vocab_size=len(words), max_seq_len=config.seq_len,
        chat_template=chat_template_of(words), model=base,
    )  # fmt: skip
    adapted = attach(base, adapter_spec(config), config.seed)
    names = tuple(name for name, p in adapted.named_parameters() if p.requires_grad)
    part = split_part(adapted, Cut(config.cut_bottom, config.cut_top), "middle")
    return Half(part, names, split_terms(config, identity_text(identity), adapted))
