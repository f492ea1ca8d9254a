"""Small models and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from flower_geo.models import build_model

VOCAB = 64


def small(spec: str = "gpt2-nano", seed: int = 0) -> Any:
    return build_model(spec, seed=seed, vocab_size=VOCAB, max_seq_len=16)


def with_dropout(rate: float = 0.2) -> Any:
    """A GPT-2 with dropout, the same at each call."""
    config = GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=rate,
        embd_pdrop=rate, attn_pdrop=rate, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model


def batches(seed: int = 0, rows: int = 2, length: int = 8) -> Callable[[], Tensor]:
    """An endless source of batches; the same seed gives the same ones."""

    def drawn() -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randint(0, VOCAB, (rows, length), generator=generator)

    stream = drawn()
    return lambda: next(stream)


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
