from __future__ import annotations

from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from flower_geo.errors import ModelError
from flower_geo.models import (
    build_model,
    check_vocab,
    load_state,
    parameter_count,
    snapshot,
    trained_state,
)
from tests.models.conftest import NAMED

TIED = {"gpt2-nano": "transformer.wte.weight", "llama-nano": "model.embed_tokens.weight"}


def small(spec: str = "gpt2-nano", seed: int = 0, vocab_size: int = 257) -> Any:
    return build_model(spec, seed=seed, vocab_size=vocab_size, max_seq_len=16)


@pytest.mark.parametrize("spec", NAMED)
def test_tied_tensors_are_one_entry(spec: str) -> None:
    model = small(spec)
    state = trained_state(model)
    assert TIED[spec] in state and "lm_head.weight" not in state
    assert "lm_head.weight" in model.state_dict()
    assert len({t.data_ptr() for t in state.values()}) == len(state)


@pytest.mark.parametrize("spec", NAMED)
def test_state_is_all_of_the_model_and_nothing_more(spec: str) -> None:
    model = build_model(spec, seed=0)
    state = trained_state(model)
    assert sum(t.numel() for t in state.values()) == parameter_count(spec, 4096)
    buffers = {name for name, _ in model.named_buffers()}
    assert not buffers & set(state)
    assert (spec == "llama-nano") == bool(buffers)
    assert list(state) == list(trained_state(build_model(spec, seed=9)))


def test_untied_heads_are_two_entries() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    state = trained_state(LlamaForCausalLM(config))
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= set(state)


def test_frozen_parameters_are_no_state() -> None:
    model = small()
    model.transformer.wpe.weight.requires_grad_(False)
    assert "transformer.wpe.weight" not in trained_state(model)


def test_trained_state_is_live_and_snapshot_is_not() -> None:
    model = small()
    live, copies = trained_state(model), snapshot(model)
    name = "transformer.h.0.mlp.c_fc.weight"
    assert not live[name].requires_grad
    before = copies[name].clone()
    live[name].add_(1.0)
    assert torch.equal(model.transformer.h[0].mlp.c_fc.weight, before + 1.0)
    assert torch.equal(copies[name], before)


def test_snapshots_are_plain_fp32_and_fit_safetensors() -> None:
    model = small().bfloat16()
    state = snapshot(model)
    assert {t.dtype for t in state.values()} == {torch.float32}
    assert all(t.is_contiguous() and t.device.type == "cpu" for t in state.values())
    again = load(save(state))
    assert all(torch.equal(again[name], state[name]) for name in state)


@pytest.mark.parametrize("spec", NAMED)
def test_loading_keeps_ties(spec: str) -> None:
    model, other = small(spec), small(spec, seed=5)
    pointers = {n: p.data_ptr() for n, p in model.named_parameters()}
    load_state(model, snapshot(other))
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == pointers
    assert model.lm_head.weight is model.get_input_embeddings().weight
    ids = torch.arange(16).reshape(1, 16)
    assert torch.equal(model(input_ids=ids).logits, other(input_ids=ids).logits)


def test_loading_is_strict_and_all_or_nothing() -> None:
    model = small()
    before = snapshot(model)
    good = snapshot(small(seed=5))
    name = "transformer.ln_f.bias"
    lacking = {k: v for k, v in good.items() if k != name}
    for state, said in (
        (lacking, f"lack {name}"),
        (good | {"lm_head.weight": torch.zeros(257, 128)}, "hold unknown lm_head.weight"),
        (good | {name: torch.zeros(3)}, rf"{name} \(\(3,\), not \(128,\)\)"),
        ({}, "and 49 more"),
    ):
        with pytest.raises(ModelError, match=said) as caught:
            load_state(model, state)
        assert "\n" not in str(caught.value)
    assert all(torch.equal(before[k], v) for k, v in snapshot(model).items())


def test_loading_does_not_disturb_autograd() -> None:
    model = small()
    load_state(model, snapshot(small(seed=1)))
    ids = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.is_leaf and p.grad is not None for p in model.parameters())


def test_state_of_any_module() -> None:
    layer = nn.Linear(2, 3)
    load_state(layer, {"weight": torch.ones(3, 2), "bias": torch.zeros(3)})
    assert list(snapshot(layer)) == ["weight", "bias"]
    assert torch.equal(layer.weight, torch.ones(3, 2))


@pytest.mark.parametrize(("rows", "fits"), [(257, True), (320, True), (256, False), (4096, False)])
def test_vocabularies_must_belong_together(rows: int, fits: bool, tokenizer: Any) -> None:
    model = small(vocab_size=rows)
    if fits:
        check_vocab(model, tokenizer)
        return
    with pytest.raises(ModelError, match=f"vocabulary of {rows} and the tokenizer one of 257"):
        check_vocab(model, tokenizer)
