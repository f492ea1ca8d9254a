from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from flower_geo.errors import ModelError
from flower_geo.models import (
    AdapterSpec,
    adapter_state,
    attach,
    build_model,
    export_adapter,
    export_merged,
    export_model,
    fold,
    load_adapter_state,
    snapshot,
    spec_from_config,
)
from flower_geo.models.adapter_export import _at_full_rank
from tests.models.conftest import NAMED
from tests.models.test_adapter import EMBEDDING, IDS, train
from tests.models.test_fold import ODD, SQUARE, as_linear, changed

VOCAB = 257

SPECS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"rslora": True, "alpha": 5},
    "whole": {"modules_to_save": ("EMBEDDING",)},
}


def base(name: str) -> Any:
    return build_model(name, seed=0, vocab_size=VOCAB, max_seq_len=16)


def trained(name: str, **spec: Any) -> tuple[Any, dict[str, Tensor]]:
    if spec.get("modules_to_save"):
        spec["modules_to_save"] = (EMBEDDING[name],)
    model: Any = attach(base(name), AdapterSpec(**({"rank": 4, "alpha": 8} | spec)), 3)
    train(model, 2)
    return model.eval(), adapter_state(model)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model.eval()(input_ids=IDS).logits
    return found


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", NAMED)
def test_peft_loads_the_folder_to_the_same_bits(
    name: str, spec: str, tmp_path: Path, tokenizer: Any
) -> None:
    model, state = trained(name, **SPECS[spec])
    before = logits(model)
    card = {"title": "Trained", "sites": 4}
    export_adapter(model, state, tokenizer, tmp_path / "a", card, merged=True)
    assert torch.equal(logits(model), before), "the live model is not touched"
    loaded: Any = PeftModel.from_pretrained(base(name), str(tmp_path / "a"))
    assert torch.equal(logits(loaded), before)
    own = AdapterSpec(**{k: v for k, v in SPECS[spec].items() if k != "modules_to_save"})
    config = spec_from_config(loaded.peft_config["default"])
    assert (config.rank, config.rslora) == (4, own.rslora)
    merged = loaded.merge_and_unload()
    assert torch.allclose(logits(merged), before, atol=1e-4)
    for module in (ODD[name][0], SQUARE[name]):
        stem = f"base_model.model.{module}.lora_"
        scale = model.get_submodule(f"base_model.model.{module}").scaling["default"]
        wanted = as_linear(base(name), module)
        wanted = wanted + scale * state[f"{stem}B.weight"] @ state[f"{stem}A.weight"]
        assert (as_linear(merged, module) - wanted).norm() < 1e-5 * wanted.norm()
    whole = build_model(str(tmp_path / "a" / "merged"), seed=0)
    assert torch.allclose(logits(whole), before, atol=1e-4)
    text = (tmp_path / "a" / "README.md").read_text()
    assert "# Trained" in text
    assert "library_name" in text
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == VOCAB


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_with_folds_the_original_base_and_the_folder_are_the_trained_model(
    name: str, folded: bool, tmp_path: Path, tokenizer: Any
) -> None:
    model, state = trained(name)
    folds = changed(name)
    fold(model, folds)
    wanted = logits(model)
    if not folded:
        model = attach(base(name), AdapterSpec(rank=4, alpha=8), 3)
    target = tmp_path / "a"
    export_adapter(model, state, tokenizer, target, "# Card\n", folds, folded=folded)
    loaded: Any = PeftModel.from_pretrained(base(name), str(target))
    assert torch.allclose(logits(loaded), wanted, atol=1e-4)
    assert torch.allclose(logits(loaded.merge_and_unload()), wanted, atol=1e-4)
    whole = AutoModelForCausalLM.from_pretrained(target / "merged", local_files_only=True)
    assert torch.allclose(logits(whole), wanted, atol=1e-4)
    assert len(AutoTokenizer.from_pretrained(target / "merged")) == VOCAB
    config = json.loads((target / "adapter_config.json").read_text())
    assert config["r"] == 4 + 5 == config["lora_alpha"]
    assert (target / "README.md").read_text() == "# Card\n"


@pytest.mark.parametrize("name", NAMED)
def test_a_fold_where_no_adapter_sits_is_in_the_folder_too(
    name: str, tmp_path: Path, tokenizer: Any
) -> None:
    model, state = trained(name, target_modules=SQUARE[name])
    fold(model, changed(name))
    target = tmp_path / "a"
    export_adapter(model, state, tokenizer, target, {}, changed(name), folded=True, merged=False)
    assert not (target / "merged").exists()
    loaded: Any = PeftModel.from_pretrained(base(name), str(target))
    assert torch.allclose(logits(loaded), logits(model), atol=1e-4)
    config = json.loads((target / "adapter_config.json").read_text())
    assert config["rank_pattern"] == {ODD[name][0]: 3}


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_modules_of_other_ranks_and_scales_are_written_at_one_scale(
    name: str, rslora: bool, tmp_path: Path, tokenizer: Any
) -> None:
    spec: dict[str, Any] = {
        "rank_pattern": {SQUARE[name]: 6},
        "alpha_pattern": {ODD[name][0]: 3.0},
        "rslora": rslora,
    }
    model, state = trained(name, **spec)
    export_adapter(model, state, tokenizer, tmp_path / "a", {})
    loaded: Any = PeftModel.from_pretrained(base(name), str(tmp_path / "a"))
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    # a loader that knows one r and one alpha alone reads the same model
    one = config["lora_alpha"] / config["r"]
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert config["r"] == max(t.shape[0] for n, t in tensors.items() if "lora_A" in n)
    for module in (SQUARE[name], ODD[name][0]):
        stem = f"base_model.model.{module}.lora_"
        own = AdapterSpec(rank=4, alpha=8, **spec).scale_of(module)
        wanted = own * state[f"{stem}B.weight"] @ state[f"{stem}A.weight"]
        found = one * tensors[f"{stem}B.weight"] @ tensors[f"{stem}A.weight"]
        assert torch.allclose(found, wanted, atol=1e-6)


def test_a_state_of_another_rank_keeps_the_spec_s_scale(tmp_path: Path, tokenizer: Any) -> None:
    model, state = trained("llama-nano")
    # the same products at rank 8: the second half adds nothing
    wide = {
        n: torch.cat([t, torch.zeros_like(t)], dim=0 if "lora_A" in n else 1)
        for n, t in state.items()
    }
    export_adapter(model, wide, tokenizer, tmp_path / "a", {})
    loaded: Any = PeftModel.from_pretrained(base("llama-nano"), str(tmp_path / "a"))
    assert torch.allclose(logits(loaded), logits(model), atol=1e-5)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 16)


def test_more_ranks_than_a_matrix_has_are_written_as_the_matrix() -> None:
    for out, in_ in ((3, 5), (5, 3)):
        b, a = torch.randn(out, 9), torch.randn(9, in_)
        left, right = _at_full_rank(b, a)
        assert left.shape[1] == 3
        assert torch.allclose(left @ right, b @ a, atol=1e-6)


@pytest.mark.parametrize("name", NAMED)
def test_export_merged_is_an_ordinary_model(name: str, tmp_path: Path, tokenizer: Any) -> None:
    model, state = trained(name, modules_to_save=True)
    export_merged(model, state, tokenizer, tmp_path / "m", changed(name))
    fold(model, changed(name))
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "m", local_files_only=True)
    assert torch.allclose(logits(loaded), logits(model), atol=1e-4)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert build_model(str(tmp_path / "m"), seed=0).config.eos_token_id == tokenizer.eos_token_id
    names = set(load_file(tmp_path / "m" / "model.safetensors"))
    assert not [n for n in names if "lora" in n or "base_layer" in n or "modules_to_save" in n]


def test_a_base_in_a_folder_is_found_by_the_config(tmp_path: Path, tokenizer: Any) -> None:
    plain = base("llama-nano")
    export_model(plain, snapshot(plain), tokenizer, tmp_path / "base")
    model: Any = attach(build_model(str(tmp_path / "base"), seed=0), AdapterSpec(rank=2), 0)
    train(model)
    export_adapter(model, adapter_state(model), tokenizer, tmp_path / "a", {})
    loaded = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "a")
    assert torch.equal(logits(loaded), logits(model))
    assert f'base_model: "{tmp_path / "base"}"' in (tmp_path / "a" / "README.md").read_text()
    export_adapter(model, adapter_state(model), tokenizer, tmp_path / "a", {}, base="org/name")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/name"


def test_the_same_adapter_gives_the_same_files(tmp_path: Path, tokenizer: Any) -> None:
    model, state = trained("llama-nano", target_modules="q_proj,v_proj,up_proj")
    for folder in ("a", "b"):
        export_adapter(model, state, tokenizer, tmp_path / folder, {"sites": 3})
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} < set(names)
    for name in names:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert config["target_modules"] == ["q_proj", "up_proj", "v_proj"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_what_does_not_fit_is_refused_and_leaves_the_old_folder(
    tmp_path: Path, tokenizer: Any
) -> None:
    model, state = trained("llama-nano")
    export_adapter(model, state, tokenizer, tmp_path / "a", "old")
    short = dict(list(state.items())[2:])
    with pytest.raises(ModelError, match="lacks base_model"):
        export_adapter(model, short, tokenizer, tmp_path / "a", "new")
    with pytest.raises(ModelError, match="has no nothing"):
        bad = {"nothing": (torch.zeros(2, 1), torch.zeros(1, 2))}
        export_adapter(model, state, tokenizer, tmp_path / "a", "new", bad)
    small: Any = attach(build_model("llama-nano", seed=0, vocab_size=64), AdapterSpec(rank=4), 0)
    with pytest.raises(ModelError, match="vocabulary of 64"):
        export_adapter(small, state, tokenizer, tmp_path / "a", "new")
    assert (tmp_path / "a" / "README.md").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_an_exported_adapter_goes_back_into_a_run(tmp_path: Path, tokenizer: Any) -> None:
    model, state = trained("gpt2-nano", modules_to_save=True)
    export_adapter(model, state, tokenizer, tmp_path / "a", {})
    loaded: Any = PeftModel.from_pretrained(base("gpt2-nano"), str(tmp_path / "a"))
    spec = spec_from_config(loaded.peft_config["default"])
    fresh = attach(base("gpt2-nano"), spec, 9)
    load_adapter_state(fresh, adapter_state(loaded))
    assert torch.equal(logits(fresh), logits(model))
