"""Models of three or four thin layers and batches with padding, for the tests of cutting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 48
PADDINGS = ["none", "left", "right"]
FAMILIES = ["gpt2", "llama", "qwen2", "qwen3", "mistral"]


def small_model(
    family: str,
    *,
    layers: int = 3,
    tied: bool = True,
    attention: str = "sdpa",
    dropout: float = 0.0,
    seed: int = 0,
    **extra: Any,
) -> Any:
    """A model of width 16, in training mode, with a loss and with weights far from zero."""
    common = {"vocab_size": VOCAB, "tie_word_embeddings": tied, "attn_implementation": attention}
    if family == "gpt2":
        config = AutoConfig.for_model(
            "gpt2", n_positions=32, n_embd=16, n_layer=layers, n_head=2,
            resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **common, **extra,
        )  # fmt: skip
    else:
        config = AutoConfig.for_model(
            family, hidden_size=16, intermediate_size=24, num_hidden_layers=layers,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=32,
            attention_dropout=dropout, **{"pad_token_id": None} | common | extra,
        )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        build: Any = AutoModelForCausalLM.from_config
        model: Any = build(config, attn_implementation=attention)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.loss_type = "ForCausalLM"
    return model.train()


def batch(padding: str, seed: int = 0, rows: int = 3, length: int = 9) -> dict[str, Tensor]:
    """Ids, mask and labels [rows, length]; the rows have length, length-1, ... tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows if padding != "none" else 0):
        gap = slice(0, row) if padding == "left" else slice(length - row, length)
        mask[row, gap] = 0
    return {
        "input_ids": ids.masked_fill(mask == 0, 0),
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }
