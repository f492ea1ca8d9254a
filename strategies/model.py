"""The model as a run's coordinator needs it: initial weights, export, a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_geo.config import CommonConfig
from flower_geo.data import load_tokenizer, tokenizer_hash
from flower_geo.errors import ReplyRefused
from flower_geo.messages import Reply
from flower_geo.models import (
    build_model,
    check_vocab,
    export_model,
    load_state,
    sample_text,
    snapshot,
)

__all__ = ["RunModel"]


@dataclass
class RunModel:
    """Model and tokenizer named by a configuration, built once, when first used."""

    config: CommonConfig

    @cached_property
    def tokenizer(self) -> Any:
        """The run's tokenizer."""
        return load_tokenizer(self.config.tokenizer)

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash all sites' tokenizers must have."""
        return tokenizer_hash(self.tokenizer)

    @cached_property
    def model(self) -> Any:
        """The model with its initial weights."""
        built = build_model(
            self.config.model, seed=self.config.seed, vocab_size=len(self.tokenizer),
            max_seq_len=self.config.seq_len,
        )  # fmt: skip
        check_vocab(built, self.tokenizer)
        return built

    def weights(self) -> dict[str, Tensor]:
        """fp32 copies of the model's trained parameters."""
        return snapshot(self.model)

    def check(self, reply: Reply) -> None:
        """Raise ``ReplyRefused`` for a site that cannot train this model."""
        if reply.tokenizer_hash != self.tokenizer_hash:
            raise ReplyRefused(
                f"site {reply.site} has another tokenizer than the coordinator "
                f"({reply.tokenizer_hash[:12]} against {self.tokenizer_hash[:12]}); "
                "give both the same tokenizer, by run-config tokenizer= or node-config tokenizer="
            )

    def prepare(self) -> None:
        """Build the model; read what the coordinator itself evaluates on, where there is any.

        A fault in either ends a run early, and what a commit does beside a round draws
        from no random state that a site in the same process trains with.
        """
        _ = self.model

    def measure(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Figures on the coordinator's own set; empty where there is none."""
        return {}

    def export(self, weights: Mapping[str, Tensor], folder: Path, facts: Mapping[str, Any]) -> None:
        """Write ``weights`` as a Hugging Face folder.

        ``facts`` are what a model card says of the run so far.
        """
        export_model(self.model, weights, self.tokenizer, folder)

    def describe(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the card of an exported folder anew, where it has one."""

    def sample(self, weights: Mapping[str, Tensor]) -> str:
        """Text the model goes on with from the configured prompt."""
        if not self.config.sample_tokens:
            return ""
        load_state(self.model, weights)
        return str(
            sample_text(
                self.model, self.tokenizer, self.config.sample_prompt,
                max_new_tokens=self.config.sample_tokens, seed=self.config.seed,
            )
        )  # fmt: skip
