from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from flower_geo.errors import ModelError
from flower_geo.models import (
    AdapterSpec,
    adapter_parameters,
    adapter_state,
    attach,
    build_model,
    factors_of,
    load_adapter_state,
    lora_keys,
    set_trained,
)
from flower_geo.models.adapter import initial_a
from tests.models.conftest import NAMED

IDS = torch.arange(16)[None]
#: Name of the input embedding by model.
EMBEDDING = {"gpt2-nano": "wte", "llama-nano": "embed_tokens"}


def adapted(name: str = "llama-nano", seed: int = 3, **spec: Any) -> Any:
    model = build_model(name, seed=0, vocab_size=64, max_seq_len=16)
    return attach(model, AdapterSpec(**({"rank": 4, "alpha": 8} | spec)), seed)


def train(model: Any, steps: int = 1) -> None:
    moved = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(moved, lr=0.01, weight_decay=0.1)
    for _ in range(steps):
        model(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", NAMED)
def test_auto_is_every_linear_layer_of_attention_and_mlp(name: str) -> None:
    state = adapter_state(adapted(name))
    layers, kinds = (4, 7) if name == "llama-nano" else (4, 4)
    factors, whole = factors_of(state)
    assert len(factors) == layers * kinds
    assert not whole
    assert "lm_head" not in factors
    assert all(t.dtype == torch.float32 and t.is_contiguous() for t in state.values())
    assert all(key in state for module in factors for key in lora_keys(module))
    if name == "gpt2-nano":
        b, a = factors["transformer.h.0.attn.c_attn"]
        assert (b.shape, a.shape) == ((384, 4), (4, 128))  # [out, r], [r, in], also for Conv1D


@pytest.mark.parametrize("name", NAMED)
def test_a_fresh_adapter_changes_nothing_and_disturbs_nothing(name: str) -> None:
    plain = build_model(name, seed=0, vocab_size=64, max_seq_len=16)(input_ids=IDS).logits
    torch.manual_seed(11)
    before = torch.get_rng_state()
    model = adapted(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(model(input_ids=IDS).logits, plain)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all(".lora_" in name for name in trained)


def test_a_is_a_function_of_seed_and_name_and_nests_by_rank() -> None:
    small, large = adapter_state(adapted(rank=4)), adapter_state(adapted(rank=16))
    other = adapter_state(adapted(seed=4))
    torch.manual_seed(99)
    with torch.device("meta"):
        again = adapter_state(adapted())
    for name, tensor in small.items():
        assert torch.equal(tensor, again[name])
        if "lora_A" in name:
            assert torch.equal(tensor, large[name][:4])
            assert not torch.equal(tensor, other[name])
            bound = 1 / math.sqrt(tensor.shape[1])
            assert 0.9 * bound < tensor.abs().max() <= bound
            assert abs(tensor.std() / (bound / math.sqrt(3)) - 1) < 0.1
        else:
            assert not tensor.any()
    rows = {tuple(a[0, :3].tolist()) for a in small.values() if a.any()}
    assert len(rows) == len(small) / 2, "two modules drew the same A"
    # what the seed means must never change: sites and coordinator need not run one version
    assert initial_a(3, "m", 1, 4)[0].tolist() == pytest.approx(GOLDEN, abs=1e-7)
    assert torch.equal(initial_a(3, "m", 1, 4), initial_a(3, "base_model.model.m", 1, 4))


GOLDEN = [0.29492491, -0.36007851, -0.00673079, 0.32120049]


@pytest.mark.parametrize("name", NAMED)
def test_what_was_trained_goes_round(name: str) -> None:
    model, fresh = adapted(name, dropout=0.1), adapted(name, dropout=0.1)
    start = adapter_state(model)
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    train(model, 2)
    state = adapter_state(model)
    assert all(not torch.equal(state[n], start[n]) for n in state)
    assert all(torch.equal(p, dict(model.named_parameters())[n]) for n, p in base.items())
    load_adapter_state(fresh, state)
    back = adapter_state(fresh)
    assert list(back) == list(state)
    assert all(torch.equal(back[n], state[n]) for n in state)
    assert torch.equal(fresh.eval()(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)
    train(model)
    assert all(torch.equal(back[n], state[n]) for n in state), "a state is a copy"


@pytest.mark.parametrize("asked", ["embedding", "lm_head", "both"])
@pytest.mark.parametrize("name", NAMED)
def test_tied_embeddings_trained_whole_stay_tied_and_are_sent_once(name: str, asked: str) -> None:
    names = {"embedding": (EMBEDDING[name],), "lm_head": ("lm_head",)}
    to_save = names.get(asked, (EMBEDDING[name], "lm_head"))
    model = adapted(name, modules_to_save=to_save)
    state = adapter_state(model)
    whole = factors_of(state)[1]
    assert [key.split(".")[-2] for key in whole] == [EMBEDDING[name]]
    train(model)
    after = adapter_state(model)
    key = next(n for n in state if "lora" not in n)
    assert not torch.equal(after[key], state[key])
    heads = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    assert heads[0] is heads[1]
    fresh = adapted(name, modules_to_save=to_save)
    load_adapter_state(fresh, after)
    assert torch.equal(fresh(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_a_resized_embedding_is_in_the_state() -> None:
    def resized() -> Any:
        model: Any = build_model("llama-nano", seed=0, vocab_size=64)
        model.resize_token_embeddings(70, mean_resizing=False)
        return attach(model, AdapterSpec(rank=2, modules_to_save=("embed_tokens", "norm")), 0)

    model, fresh = resized(), resized()
    train(model)
    state = adapter_state(model)
    whole = factors_of(state)[1]
    assert whole["model.embed_tokens.weight"].shape == (70, 128)
    assert "model.norm.weight" in whole
    load_adapter_state(fresh, state)
    assert torch.equal(fresh(input_ids=IDS).logits, model(input_ids=IDS).logits)
    with pytest.raises(ModelError, match=r"embed_tokens.weight \(\(70, 128\), not \(64, 128\)\)"):
        load_adapter_state(adapted(rank=2, modules_to_save=("embed_tokens", "norm")), state)


def test_a_state_that_does_not_fit_is_named_in_one_line_and_not_loaded() -> None:
    model = adapted()
    before = adapter_state(model)
    state = {n: t + 1 for n, t in before.items()}
    gone, wide = next(iter(state)), list(state)[3]
    state["base_model.model.extra.lora_A.weight"] = state.pop(gone)
    state[wide] = torch.zeros(1, 2, 3)
    with pytest.raises(ModelError) as error:
        load_adapter_state(model, state)
    said = str(error.value)
    assert f"lacks {gone}" in said
    assert "holds unknown base_model.model.extra.lora_A.weight" in said
    assert f"other shapes at {wide} ((1, 2, 3), not" in said
    assert "\n" not in said
    after = adapter_state(model)
    assert all(torch.equal(after[n], before[n]) for n in before)
    with pytest.raises(ModelError, match=r"other shapes.* and 53 more"):
        load_adapter_state(model, adapter_state(adapted(rank=5)))


def test_only_what_is_chosen_trains_and_weight_decay_moves_nothing_else() -> None:
    model = adapted()
    train(model)
    for side in ("lora_A", "lora_B"):
        for parameter in adapter_parameters(model).values():
            parameter.grad = torch.ones_like(parameter)
        names = set_trained(model, lambda name, side=side: side in name)  # type: ignore[misc]
        assert names == [n for n in adapter_parameters(model) if side in n]
        assert all(
            (p.grad is None) == (side not in n) for n, p in adapter_parameters(model).items()
        )
        for parameter in model.parameters():
            parameter.grad = None
        before = adapter_state(model)
        train(model, 2)
        after = adapter_state(model)
        assert all(torch.equal(before[n], after[n]) == (side not in n) for n in before)
    with pytest.raises(ModelError, match="none of the adapter's 56 tensors"):
        set_trained(model, lambda name: "absent" in name)


def test_names_and_expressions_choose_modules() -> None:
    for target in ("q_proj, v_proj", ("q_proj", "v_proj"), r".*\.(q|v)_proj"):
        factors = factors_of(adapter_state(adapted(target_modules=target)))[0]
        assert {name.rpartition(".")[2] for name in factors} == {"q_proj", "v_proj"}
    one = factors_of(adapter_state(adapted(target_modules="layers.1.mlp.up_proj")))[0]
    assert list(one) == ["model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"target_modules": "q_proj,w_proj"}, "no module w_proj.*q_proj"),
        ({"target_modules": "(nothing)+"}, "meets no module"),
        ({"target_modules": "embed_tokens"}, "embed_tokens, a Embedding.*modules_to_save"),
        ({"target_modules": "lm_head"}, "lm_head shares its weight with model.embed_tokens"),
        ({"rank_pattern": {"w_proj": 2}}, "rank pattern 'w_proj' meets no target"),
        ({"alpha_pattern": {"w_proj": 2}}, "alpha pattern 'w_proj' meets no target"),
        ({"modules_to_save": ("score",)}, "no module score to train whole"),
    ],
)
def test_where_no_adapter_can_go_is_said_in_one_line(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as error:
        adapted(**spec)
    assert "\n" not in str(error.value)


def test_one_model_takes_one_adapter() -> None:
    with pytest.raises(ModelError, match="has an adapter already"):
        attach(adapted(), AdapterSpec(), 0)


def test_half_a_pair_of_factors_is_refused() -> None:
    state = adapter_state(adapted())
    key_a, key_b = lora_keys("model.layers.0.self_attn.q_proj")
    with pytest.raises(ModelError, match=r"q_proj.lora_A.weight has no lora_B"):
        factors_of({n: t for n, t in state.items() if n != key_b})
    with pytest.raises(ModelError, match=r"q_proj.lora_B.weight has no lora_A"):
        factors_of({n: t for n, t in state.items() if n != key_a})
    with pytest.raises(ModelError, match="no lora_B of its rank"):
        factors_of(state | {key_a: torch.zeros(3, 128)})


def test_attaching_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    adapted("gpt2-nano", modules_to_save=("wte",))
    assert not any(capfd.readouterr())


def test_a_half_precision_base_keeps_its_adapter_in_fp32() -> None:
    model: Any = build_model("llama-nano", seed=0, vocab_size=64)
    model.to(torch.bfloat16)
    attached = attach(model, AdapterSpec(rank=2), 0)
    assert {p.dtype for p in adapter_parameters(attached).values()} == {torch.float32}
    assert isinstance(attached.get_base_model(), nn.Module)
