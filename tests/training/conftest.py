"""Small models and batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

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


def untied() -> Any:
    """A Llama whose head is a matrix of its own, the same at each call."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
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


def labelled(seed: int = 0, rows: int = 2, length: int = 8) -> Callable[[], dict[str, Tensor]]:
    """An endless source of padded batches with labels on the later part of each row."""

    def drawn() -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield labelled_batch(generator, rows, length)

    stream = drawn()
    return lambda: next(stream)


def labelled_batch(generator: torch.Generator, rows: int, length: int) -> dict[str, Tensor]:
    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    ids = torch.randint(1, VOCAB, (rows, length), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row in range(rows):
        end = number(length // 2, length + 1)
        ids[row, end:], mask[row, end:], labels[row, end:] = 0, 0, -100
        labels[row, : number(1, end - 1)] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def unlabelled(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"labels": torch.full_like(batch["labels"], -100)}


def adapted(model: Any, dropout: float = 0.0, **values: Any) -> Any:
    """A LoRA adapter on a model, B not at zero, the same at each call."""
    from peft import LoraConfig, get_peft_model

    targets = ["c_attn", "c_fc"] if model.config.model_type == "gpt2" else ["q_proj", "up_proj"]
    settings = {
        "r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM",
        "lora_dropout": dropout, "fan_in_fan_out": model.config.model_type == "gpt2",
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        found = get_peft_model(model, LoraConfig(**(settings | values)))
        with torch.no_grad():
            for name, parameter in found.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.05)
    return found


def weights(model: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
