"""The cloud's half of a cut model, as the configuration names it."""

from __future__ import annotations

from dataclasses import dataclass

from flower_geo.config import SplitConfig
from flower_geo.data import load_tokenizer
from flower_geo.data.instructions import chat_template_of
from flower_geo.models.adapted import adapted_base
from flower_geo.models.adapter_choice import adapter_spec
from flower_geo.models.split import Cut, SplitPart, split_part
from flower_geo.models.split.terms import split_terms

__all__ = ["Half", "built_half"]


@dataclass(frozen=True)
class Half:
    """The middle with its adapter, and what a site must have alike.

    Attributes:
        part: the middle.
        terms: for the handshake.
    """

    part: SplitPart
    terms: dict[str, str]


def built_half(config: SplitConfig) -> Half:
    """Build or load the base, put the adapter on, and keep the middle.

    Raises:
        ModelError: the model cannot be had, or not be cut there.
    """
    made = adapted_base(config, adapter_spec(config), load_tokenizer, chat_template_of)
    part = split_part(made.model, Cut(config.cut_bottom, config.cut_top), "middle")
    return Half(part, split_terms(config, made.identity, made.model))
