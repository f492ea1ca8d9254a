"""The adapter as a run's coordinator needs it: initial factors, its base, export, a sample."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_geo.aggregation.adapter_parts import folds_in, is_fold, module_of
from flower_geo.aggregation.lora import combine
from flower_geo.config import FedAvgLoRAConfig
from flower_geo.data import load_tokenizer
from flower_geo.data.instructions import chat_template_of
from flower_geo.durable import write_bytes
from flower_geo.errors import ReplyRefused
from flower_geo.messages import Reply
from flower_geo.models import (
    adapter_state,
    attach,
    base_identity,
    check_vocab,
    export_adapter,
    load_adapter_state,
    load_base,
    model_card,
    sample_text,
)
from flower_geo.models.adapter import initial_a
from flower_geo.models.adapter_choice import adapter_spec, adapter_tokenizer
from flower_geo.models.folding import FoldedBase
from flower_geo.models.identity_text import differing_in, identity_text
from flower_geo.strategies.adapter_facts import CARD, adapter_facts
from flower_geo.strategies.model import RunModel
from flower_geo.strategies.server_set import ServerSet

__all__ = ["AdapterModel"]


class AdapterModel(RunModel):
    """Frozen base, adapter and tokenizer named by a configuration, built when first used."""

    config: FedAvgLoRAConfig

    @cached_property
    def tokenizer(self) -> Any:
        """The run's tokenizer."""
        return adapter_tokenizer(self.config.model, self.config.tokenizer, load_tokenizer)

    @cached_property
    def model(self) -> Any:
        """The base with a fresh adapter on it; the base in full precision."""
        config = self.config
        base = load_base(
            config.model, seed=config.seed, vocab_size=len(self.tokenizer),
            max_seq_len=config.seq_len,
        )  # fmt: skip
        check_vocab(base, self.tokenizer)
        adapted = attach(base, self.adapter, config.seed)
        self._fresh = adapter_state(adapted)
        return adapted

    @cached_property
    def adapter(self) -> Any:
        """Ranks and scales at the coordinator."""
        return adapter_spec(self.config)

    @cached_property
    def identity(self) -> str:
        """What every site's base must be."""
        return identity_text(self._hashes)

    @cached_property
    def _hashes(self) -> dict[str, str]:
        config = self.config
        return base_identity(
            config.model, self.tokenizer, seed=config.seed, vocab_size=len(self.tokenizer),
            max_seq_len=config.seq_len, chat_template=chat_template_of(self.tokenizer),
        )  # fmt: skip

    @cached_property
    def _base(self) -> FoldedBase:
        return FoldedBase(self.model)

    def weights(self) -> dict[str, Tensor]:
        """fp32 copies of the fresh adapter, whatever the live model holds by now."""
        _ = self.model  # built, it leaves its first adapter
        return {name: tensor.clone() for name, tensor in self._fresh.items()}

    @cached_property
    def server_set(self) -> ServerSet | None:
        """What the coordinator evaluates on."""
        return ServerSet(self.config, self.tokenizer) if self.config.server_data else None

    def prepare(self) -> None:
        """Build the adapted base, read the server set."""
        super().prepare()
        _ = self.server_set

    def measure(self, weights: Mapping[str, Tensor]) -> dict[str, float]:
        """Figures of ``weights`` on the server set; empty where there is none."""
        return self.server_set.figures(self.put(weights)) if self.server_set else {}

    def fresh(self, names: tuple[str, str], a: Tensor, b: Tensor, round: int) -> dict[str, Tensor]:
        """A new A and a B of zeros in place of ``a`` and ``b``, a function of seed and round."""
        again = initial_a((self.config.seed << 20) + round, module_of(names[0]), *a.shape)
        return {names[0]: again, names[1]: b.new_zeros(b.shape)}

    def check(self, reply: Reply) -> None:
        """Raise ``ReplyRefused`` for a site with another base, by name of what differs."""
        if other := differing_in(self.identity, reply.identity):
            raise ReplyRefused(
                f"site {reply.site} has another base model than the coordinator: "
                f"{', '.join(other)} differ; give both the same model folder and tokenizer"
            )

    def export(self, weights: Mapping[str, Tensor], folder: Path, facts: Mapping[str, Any]) -> None:
        """Write ``weights`` as a PEFT folder, and the merged model where it is wanted."""
        state = {name: tensor for name, tensor in weights.items() if not is_fold(name)}
        together = _summed(folds_in(weights))
        self._base.hold({})
        export_adapter(
            self.model, state, self.tokenizer, folder, self.card(facts), together,
            merged=self.config.merge or None,
        )  # fmt: skip

    def card(self, facts: Mapping[str, Any]) -> str:
        """The model card: what was trained, by how many, how it was sent, on which base."""
        return model_card(adapter_facts(self.config, self.weights(), self._hashes, facts))

    def describe(self, folder: Path, facts: Mapping[str, Any]) -> None:
        """Write the card anew, with what became known since the export."""
        write_bytes(folder / CARD, self.card(facts).encode())

    def put(self, weights: Mapping[str, Tensor]) -> Any:
        """The live model under ``weights``."""
        self._base.hold(folds_in(weights))
        load_adapter_state(
            self.model, {name: tensor for name, tensor in weights.items() if not is_fold(name)}
        )
        return self.model

    def sample(self, weights: Mapping[str, Tensor]) -> str:
        """The configured question, and what the model answers."""
        if not self.config.sample_tokens:
            return ""
        question = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": self.config.sample_prompt}], tokenize=False,
            chat_template=chat_template_of(self.tokenizer), add_generation_prompt=True,
        )  # fmt: skip
        text = sample_text(
            self.put(weights), self.tokenizer, question,
            max_new_tokens=self.config.sample_tokens, seed=self.config.seed,
        )  # fmt: skip
        asked = self.tokenizer.decode(
            self.tokenizer(question)["input_ids"], skip_special_tokens=True
        )
        answer = " ".join(text.removeprefix(str(asked)).split())
        return f"{self.config.sample_prompt} {answer}"


def _summed(folds: Mapping[str, tuple[str, Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    """All folded factors of each module beside each other."""
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for key in sorted(folds):
        module, b, a = folds[key]
        pairs.setdefault(module, []).append((b, a))
    return {module: combine(each) for module, each in pairs.items()}
