from __future__ import annotations

import pytest
import torch
from safetensors.torch import load, save

from flower_geo.errors import TrainingError
from flower_geo.training import InnerConfig, InnerLoop
from flower_geo.training.optimizer import build_optimizer, decays
from tests.training.conftest import batches, small


@pytest.mark.parametrize("spec", ["gpt2-nano", "llama-nano"])
def test_decay_is_for_matrices(spec: str) -> None:
    decayed = {n for n, p in small(spec).named_parameters() if decays(n, p)}
    for name, parameter in small(spec).named_parameters():
        plain = name.endswith("bias") or "norm" in name or ".ln_" in name
        assert (name in decayed) == (not plain), name
        assert parameter.ndim == 2 or name not in decayed
    assert decayed


def test_decay_goes_by_name_too() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    assert decays("h.0.attn.c_attn.weight", matrix)
    assert not decays("h.0.attn.c_attn.weight", vector)
    for name in ("experts.bias", "model.q_norm.weight", "h.0.ln_1.weight", "LayerNorm.weight"):
        assert not decays(name, matrix)


def test_each_parameter_is_in_one_group() -> None:
    model = small()
    parameters = dict(model.named_parameters())
    optimizer = build_optimizer(parameters, InnerConfig(weight_decay=0.3), fused=False)
    grouped = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(grouped) == len(parameters) == len({id(p) for p in grouped})
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]


def test_state_is_flat_and_fits_safetensors() -> None:
    model = small()
    loop = InnerLoop(model, InnerConfig())
    assert set(loop.state_dict()) == {"rng/cpu"}
    loop.run(batches(), steps=3)
    state = loop.state_dict()
    names = [n for n, _ in model.named_parameters()]
    assert set(state) == {
        "rng/cpu", *(f"{what}/{n}" for what in ("exp_avg", "exp_avg_sq", "step") for n in names)
    }  # fmt: skip
    assert all(state[f"step/{n}"] == 3 for n in names)
    again = load(save(state))
    assert all(torch.equal(again[key], state[key]) for key in state)


def test_state_is_a_copy() -> None:
    loop = InnerLoop(small(), InnerConfig())
    loop.run(batches(), steps=1)
    state = loop.state_dict()
    kept = {key: value.clone() for key, value in state.items()}
    loop.run(batches(), steps=1)
    assert all(torch.equal(state[key], kept[key]) for key in kept)
    other = InnerLoop(small(), InnerConfig())
    other.load_state_dict(state)
    other.run(batches(), steps=1)
    assert all(torch.equal(state[key], kept[key]) for key in kept)


def test_foreign_state_is_refused_and_changes_nothing() -> None:
    loop = InnerLoop(small(), InnerConfig())
    loop.run(batches(), steps=2)
    good = loop.state_dict()
    name = "transformer.ln_f.bias"
    for state, said in (
        (good | {"exp_avg/no.such": torch.zeros(1)}, "no.such"),
        (good | {"momentum/" + name: torch.zeros(128)}, "momentum"),
        (good | {f"exp_avg/{name}": torch.zeros(3)}, r"shape \(3,\), not \(128,\)"),
        ({k: v for k, v in good.items() if k != f"step/{name}"}, "incomplete"),
    ):
        with pytest.raises(TrainingError, match=said) as caught:
            loop.load_state_dict(state)
        assert "\n" not in str(caught.value)
    after = loop.state_dict()
    assert all(torch.equal(after[key], good[key]) for key in good)
    plain = InnerLoop(small(), InnerConfig(optimizer="sgd"))
    with pytest.raises(TrainingError, match="same model and optimizer"):
        plain.load_state_dict(good)


def test_an_empty_state_starts_anew() -> None:
    loop = InnerLoop(small(), InnerConfig())
    loop.run(batches(), steps=2)
    loop.load_state_dict({})
    assert set(loop.state_dict()) == {"rng/cpu"}
