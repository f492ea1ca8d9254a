from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from flower_geo.errors import ModelError, StateError
from flower_geo.models import build_model, export_model, load_state, snapshot
from tests.models.conftest import NAMED

IDS = torch.arange(32).reshape(2, 16)


def logits(model: Any) -> Any:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def small(spec: str, seed: int) -> Any:
    return build_model(spec, seed=seed, vocab_size=257, max_seq_len=16)


@pytest.mark.parametrize("spec", NAMED)
@pytest.mark.parametrize("by_name", [True, False])
def test_auto_classes_load_what_was_trained(
    spec: str, by_name: bool, tmp_path: Path, tokenizer: Any, capfd: Any
) -> None:
    trained = small(spec, seed=3)
    bystander = small(spec, seed=0)
    before = snapshot(bystander)
    export_model(spec if by_name else bystander, snapshot(trained), tokenizer, tmp_path / "model")
    assert all(torch.equal(before[k], v) for k, v in snapshot(bystander).items())
    assert capfd.readouterr() == ("", "")

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(trained))
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    words = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert words("Habeas corpus")["input_ids"] == tokenizer("Habeas corpus")["input_ids"]
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 0
    made = loaded.generate(IDS[:, :4], max_new_tokens=2, do_sample=False)
    assert made.shape[1] <= 6


@pytest.mark.parametrize("spec", NAMED)
def test_tied_tensors_are_stored_once(spec: str, tmp_path: Path, tokenizer: Any) -> None:
    model = small(spec, seed=0)
    export_model(model, snapshot(model), tokenizer, tmp_path / "model")
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(snapshot(model))


def test_frozen_parameters_come_from_the_model(tmp_path: Path, tokenizer: Any) -> None:
    model = small("gpt2-nano", seed=1)
    for parameter in model.transformer.wte.parameters():
        parameter.requires_grad_(False)
    state = {name: torch.zeros_like(t) for name, t in snapshot(model).items()}
    export_model(model, state, tokenizer, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    assert torch.equal(stored["transformer.wte.weight"], model.transformer.wte.weight)
    assert not stored["transformer.wpe.weight"].any()


def test_low_precision_and_shared_storage_are_fine(tmp_path: Path, tokenizer: Any) -> None:
    model = small("llama-nano", seed=1)
    state = snapshot(model)
    flat = torch.cat([t.flatten() for t in state.values()]).bfloat16()
    parts = torch.split_with_sizes(flat, [t.numel() for t in state.values()])
    shared = {name: part.view_as(state[name]) for name, part in zip(state, parts, strict=True)}
    export_model(model, shared, tokenizer, tmp_path / "model")
    load_state(model, {name: t.float() for name, t in shared.items()})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(logits(loaded), logits(model))


def test_an_older_export_is_replaced_whole(tmp_path: Path, tokenizer: Any) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "stale").touch()
    model = small("gpt2-nano", seed=2)
    export_model(model, snapshot(model), tokenizer, folder)
    assert not (folder / "stale").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failed_export_leaves_the_older_one(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    model = small("gpt2-nano", seed=2)
    export_model(model, snapshot(model), tokenizer, folder)
    kept = (folder / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
    with pytest.raises(StateError, match="No space left"):
        export_model(model, snapshot(small("gpt2-nano", seed=4)), tokenizer, folder)
    assert (folder / "model.safetensors").read_bytes() == kept
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_what_does_not_fit_is_refused_before_writing(tmp_path: Path, tokenizer: Any) -> None:
    model = small("gpt2-nano", seed=0)
    state = snapshot(model)
    state.pop("transformer.ln_f.bias")
    with pytest.raises(ModelError, match=r"lack transformer\.ln_f\.bias"):
        export_model(model, state, tokenizer, tmp_path / "model")
    other = build_model("gpt2-nano", seed=0, vocab_size=100, max_seq_len=16)
    with pytest.raises(ModelError, match="vocabulary of 100"):
        export_model(other, snapshot(other), tokenizer, tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_config_says_what_the_model_is(tmp_path: Path, tokenizer: Any) -> None:
    model = small("gpt2-nano", seed=0)
    export_model(model, snapshot(model), tokenizer, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert (config["vocab_size"], config["n_positions"]) == (257, 16)
