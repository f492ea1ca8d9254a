from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.errors import ModelError
from flower_geo.models import AdapterSpec, adapter_state, attach, build_model, export_adapter
from flower_geo.models.adapter_import import load_adapter


@pytest.fixture
def folder(tokenizer: Any, tmp_path: Path) -> Path:
    model = build_model("gpt2-pico", seed=0, vocab_size=len(tokenizer))
    peft: Any = attach(model, AdapterSpec(rank=3, alpha=5), seed=1)
    state = {
        name: torch.full_like(tensor, 0.01) + tensor for name, tensor in adapter_state(peft).items()
    }
    export_adapter(peft, state, tokenizer, tmp_path / "adapter", {})
    return tmp_path / "adapter"


def test_what_was_exported_is_read_back(folder: Path) -> None:
    from safetensors.torch import load_file

    peft: Any = load_adapter(build_model("gpt2-pico", seed=0, vocab_size=257), folder)
    state = adapter_state(peft)
    saved = load_file(folder / "adapter_model.safetensors")
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[name], saved[name]) for name in saved)
    assert peft.peft_config["default"].lora_alpha == 5


def test_it_computes_what_peft_computes(folder: Path) -> None:
    from peft import PeftModel

    ids = torch.arange(6)[None]
    plain: Any = build_model("gpt2-pico", seed=0, vocab_size=257)
    base = plain(input_ids=ids).logits
    ours: Any = load_adapter(build_model("gpt2-pico", seed=0, vocab_size=257), folder)
    theirs: Any = PeftModel.from_pretrained(plain, str(folder))
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    assert not torch.equal(ours(input_ids=ids).logits, base)


def _break(folder: Path, how: str) -> None:
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if how == "config":
        config.unlink()
    elif how == "weights":
        weights.unlink()
    elif how == "cut":
        weights.write_bytes(weights.read_bytes()[:-9])
    elif how == "json":
        config.write_text("{")
    elif how == "list":
        config.write_text("[]")
    elif how == "other":
        config.write_text(json.dumps({"peft_type": "IA3"}))
    else:
        values = json.loads(config.read_text())
        config.write_text(json.dumps(values | {"r": 2}))


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("config", "has no adapter_config.json"),
        ("weights", "has no adapter_model.safetensors"),
        ("cut", "cannot be read"),
        ("json", "cannot be read"),
        ("list", "no LoRA adapter"),
        ("other", "no LoRA adapter"),
        ("rank", "does not fit"),
    ],
    ids=lambda word: word.replace(" ", "-"),
)
def test_what_is_no_fitting_adapter_is_refused(folder: Path, how: str, said: str) -> None:
    _break(folder, how)
    with pytest.raises(ModelError, match=said) as caught:
        load_adapter(build_model("gpt2-pico", seed=0, vocab_size=257), folder)
    assert "\n" not in str(caught.value)
