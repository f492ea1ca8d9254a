"""The models that can be built by name.

Named models have dropout 0, so that training them is a function of weights and
data alone, and tied input and output embeddings.  They name no special tokens:
an export takes these from its tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

__all__ = ["MODELS", "ModelSpec"]


@dataclass(frozen=True)
class ModelSpec:
    """The shape of one decoder-only transformer.

    Attributes:
        family: architecture, one of transformers' model types.
        layers: number of blocks.
        width: hidden size.
        heads: query heads.
        context: longest sequence, in tokens.
        vocab_size: rows of the tied embedding where the caller names none.
        kv_heads: key and value heads (llama; 0 = ``heads``).
        inner: hidden size of a block's MLP (llama; GPT-2 takes 4 x ``width``).
        rope: rotary settings (llama).
    """

    family: Literal["gpt2", "llama"]
    layers: int
    width: int
    heads: int
    context: int
    vocab_size: int
    kv_heads: int = 0
    inner: int = 0
    rope: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def config_values(self, vocab_size: int | None, max_seq_len: int | None) -> dict[str, Any]:
        """Arguments of the family's transformers config.

        Args:
            vocab_size: rows of the embedding; None = the table's.
            max_seq_len: tokens a sequence may have.  Learned positions (GPT-2)
                are made exactly that many; rotary ones, which hold no weights,
                never fewer than the table's.  None = the table's.
        """
        common: dict[str, Any] = {
            "vocab_size": vocab_size or self.vocab_size,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            "tie_word_embeddings": True,
        }
        if self.family == "gpt2":
            return common | {
                "n_positions": max_seq_len or self.context,
                "n_embd": self.width,
                "n_layer": self.layers,
                "n_head": self.heads,
                # gelu_new is the same function written as eight passes over
                # memory; this one is a single kernel (6-10 % of a CPU step).
                "activation_function": "gelu_pytorch_tanh",
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            }
        return common | {
            "max_position_embeddings": max(max_seq_len or 0, self.context),
            "hidden_size": self.width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads,
            "rms_norm_eps": 1e-5,
            "attention_dropout": 0.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | dict(self.rope),
        }


#: Shapes by name.  GPT-2: Radford et al. 2019, table 2.  Llama 3.2 1B: the
#: published config.json of its base model.
MODELS: Mapping[str, ModelSpec] = MappingProxyType(
    {
        # Small enough that what surrounds training can be tried in seconds.
        "gpt2-pico": ModelSpec("gpt2", layers=2, width=32, heads=2, context=256, vocab_size=4096),
        "llama-pico": ModelSpec(
            "llama", layers=2, width=32, heads=2, context=256, vocab_size=4096,
            kv_heads=1, inner=64,
        ),
        "gpt2-nano": ModelSpec("gpt2", layers=4, width=128, heads=4, context=256, vocab_size=4096),
        "llama-nano": ModelSpec(
            "llama", layers=4, width=128, heads=4, context=256, vocab_size=4096,
            kv_heads=2, inner=384,
        ),
        "gpt2-small": ModelSpec(
            "gpt2", layers=12, width=768, heads=12, context=1024, vocab_size=50257
        ),
        "gpt2-medium": ModelSpec(
            "gpt2", layers=24, width=1024, heads=16, context=1024, vocab_size=50257
        ),
        "llama3-1b": ModelSpec(
            "llama", layers=16, width=2048, heads=32, context=131072, vocab_size=128256,
            kv_heads=8, inner=8192,
            rope=MappingProxyType(
                {
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            ),
        ),
    }
)  # fmt: skip
