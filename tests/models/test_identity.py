from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flower_geo.errors import ModelError
from flower_geo.models import (
    AdapterSpec,
    attach,
    base_identity,
    build_model,
    differing,
    export_model,
    snapshot,
)
from flower_geo.models import identity as module

VOCAB = 257


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    model = build_model("gpt2-pico", seed=1, vocab_size=VOCAB, max_seq_len=16)
    export_model(model, snapshot(model), tokenizer, tmp_path / "model")
    return tmp_path / "model"


def named(tokenizer: Any, spec: str = "gpt2-pico", **values: Any) -> dict[str, str]:
    return base_identity(
        spec, tokenizer, **({"seed": 0, "vocab_size": VOCAB, "max_seq_len": 16} | values)
    )


def test_one_base_has_one_identity_wherever_it_lies(
    folder: Path, tmp_path: Path, tokenizer: Any
) -> None:
    ours = base_identity(str(folder), tokenizer)
    assert list(ours) == list(module.IDENTITY)
    assert all(len(bytes.fromhex(value)) == 32 for value in ours.values())
    weights = load_file(folder / "model.safetensors")
    # the same tensors over three files, in another order, under other metadata
    parts = tmp_path / "parts"
    parts.mkdir()
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (parts / path.name).write_bytes(path.read_bytes())
    names = sorted(weights, reverse=True)
    where = {name: f"part-{number % 3}.safetensors" for number, name in enumerate(names)}
    for file in set(where.values()):
        held = {name: weights[name] for name in names if where[name] == file}
        save_file(held, parts / file, metadata={"format": "pt", "by": "me"})
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert differing(ours, base_identity(str(parts), tokenizer)) == []


def test_each_difference_is_named(folder: Path, tokenizer: Any) -> None:
    ours = base_identity(str(folder), tokenizer)

    def differs(changed: Any = tokenizer, **values: Any) -> list[str]:
        return differing(ours, base_identity(str(folder), changed, **values))

    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages }}"
    assert differs(other) == ["chat-template"]
    assert differs(chat_template="{{ messages }}") == ["chat-template"]
    other = copy.deepcopy(tokenizer)
    other.pad_token = "!"
    assert differs(other) == ["special-tokens"]
    other = copy.deepcopy(tokenizer)
    other.add_tokens(["word"])
    assert differs(other) == ["tokenizer"]
    other = copy.deepcopy(tokenizer)
    other("text", truncation=True, max_length=3, padding="max_length")
    assert differs(other) == []

    config = json.loads((folder / "config.json").read_text())
    write = (folder / "config.json").write_text
    write(json.dumps(config | {"n_head": 4}))
    assert differs() == ["config"]
    write(
        json.dumps(config | {"use_cache": False, "transformers_version": "9", "dtype": "float16"})
    )
    assert differs() == []
    write(json.dumps(config))

    weights = load_file(folder / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[0] += 1e-6
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert differs() == ["weights"]
    save_file({n: t.half() for n, t in weights.items()}, folder / "model.safetensors")
    assert differs() == ["weights"]


def test_named_models_are_their_content(tokenizer: Any) -> None:
    ours = named(tokenizer)
    model = build_model("gpt2-pico", seed=0, vocab_size=VOCAB, max_seq_len=16)
    module._known.clear()
    attached = attach(model, AdapterSpec(rank=2, modules_to_save=("wte",)), 0)
    assert named(tokenizer, model=attached) == ours, "an adapter is no part of the base"
    module._known.clear()
    with pytest.raises(ModelError, match="the model given is no gpt2-pico"):
        named(tokenizer, model=model)
    module._known.clear()
    assert differing(ours, named(tokenizer, seed=1)) == ["weights"]
    assert "weights" in differing(ours, named(tokenizer, max_seq_len=8))
    assert differing(ours, named(tokenizer, "gpt2-nano")) == ["weights", "config"]
    module._known.clear()
    other = build_model("gpt2-pico", seed=0, vocab_size=VOCAB, max_seq_len=16)
    with torch.no_grad():
        next(other.parameters())[0, 0].add_(1e-6)
    assert differing(ours, named(tokenizer, model=other)) == ["weights"]
    module._known.clear()


def test_files_are_hashed_once_until_they_change(
    folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base_identity(str(folder), tokenizer)
    monkeypatch.setattr(module, "_hash", lambda tensors: "0" * 64)
    assert base_identity(str(folder), tokenizer)["weights"] != "0" * 64
    os.utime(folder / "model.safetensors", (1, 1))
    assert base_identity(str(folder), tokenizer)["weights"] == "0" * 64


def test_what_the_other_side_sends_is_only_compared() -> None:
    ours = dict.fromkeys(module.IDENTITY, "a")
    assert differing(ours, {}) == list(module.IDENTITY)
    theirs: Any = ours | {"weights": ["x"], "evil\nname": "b"}
    assert differing(ours, theirs) == ["weights"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, r"has no model\.safetensors to hash"),
        ({"model.safetensors": "no tensors"}, "cannot be hashed"),
        ({"model.safetensors.index.json": "{"}, "is no index of weights"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "b"}}'}, "lacks some"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "../c"}}'}, "lacks some"),
        ({"model.safetensors.index.json": '{"weight_map": {}}'}, "lacks some"),
    ],
)
def test_weights_that_cannot_be_read_are_said_in_one_line(
    folder: Path, tokenizer: Any, content: dict[str, str] | None, said: str
) -> None:
    (folder / "model.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, folder.parent / "c")
    for name, text in (content or {}).items():
        (folder / name).write_text(text)
    with pytest.raises(ModelError, match=said) as error:
        base_identity(str(folder), tokenizer)
    assert "\n" not in str(error.value)


def test_a_hub_model_that_is_not_here_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ModelError, match="has no model"):
        base_identity("nobody/nothing", tokenizer)
