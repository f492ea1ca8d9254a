from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from flower_geo.errors import ModelError
from flower_geo.models import MODELS, build_model, export_model, snapshot
from tests.models.conftest import NAMED


def fingerprint(spec: str, seed: int, disturb: bool) -> str:
    """Hash of a model's initial weights, in whatever process this runs."""
    import hashlib

    if disturb:
        torch.set_num_threads(2)
        torch.manual_seed(987)
        torch.rand(13)
    state = snapshot(build_model(spec, seed=seed, vocab_size=300, max_seq_len=16))
    digest = hashlib.sha256()
    for name, tensor in state.items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def test_initial_weights_are_equal_across_processes() -> None:
    here = [fingerprint(spec, 7, False) for spec in NAMED]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        there = list(pool.map(fingerprint, NAMED, [7, 7], [True, True]))
    assert here == there


@pytest.mark.parametrize("spec", NAMED)
def test_initial_weights_depend_on_the_arguments_alone(spec: str) -> None:
    def built(seed: int = 3) -> dict[str, torch.Tensor]:
        return snapshot(build_model(spec, seed=seed, vocab_size=300, max_seq_len=16))

    plain = built()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), torch.no_grad():
            again = built()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(plain[name], again[name]) for name in plain)
    assert all(t.dtype == torch.float32 for t in again.values())
    other = built(seed=4)
    assert any(not torch.equal(plain[name], other[name]) for name in plain)


def test_models_built_by_several_threads_are_what_one_builds() -> None:
    def build(seed: int) -> dict[str, torch.Tensor]:
        return snapshot(build_model("llama-pico", seed=seed, vocab_size=512, max_seq_len=32))

    seeds = [1, 2, 3, 4] * 3
    alone = {seed: build(seed) for seed in set(seeds)}
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        for seed, built in zip(seeds, pool.map(build, seeds), strict=True):
            assert all(torch.equal(built[name], alone[seed][name]) for name in built)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_built_model_trains() -> None:
    model = build_model("llama-nano", seed=0, vocab_size=64, max_seq_len=8)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert next(model.parameters()).device.type == "cpu"


def test_learned_positions_are_what_is_asked_for() -> None:
    assert build_model("gpt2-nano", seed=0).config.max_position_embeddings == 256
    for length in (16, 512):
        model = build_model("gpt2-nano", seed=0, max_seq_len=length)
        assert model.config.max_position_embeddings == length
        ids = torch.zeros(1, length, dtype=torch.long)
        assert model(input_ids=ids).logits.shape == (1, length, 4096)


def test_importing_the_package_does_not_import_transformers() -> None:
    code = "import sys, flower_geo.models; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


# -- folders ------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any) -> Path:
    model = build_model("gpt2-nano", seed=1, vocab_size=257, max_seq_len=16)
    export_model(model, snapshot(model), tokenizer, tmp_path / "model")
    return tmp_path / "model"


def test_a_folder_gives_its_own_weights_whatever_the_seed(folder: Path) -> None:
    wanted = snapshot(build_model("gpt2-nano", seed=1, vocab_size=257, max_seq_len=16))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    loaded = build_model(str(folder), seed=99, vocab_size=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert loaded.training
    found = snapshot(loaded)
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_bf16_folder_is_trained_in_fp32(folder: Path) -> None:
    weights = folder / "model.safetensors"
    halved = {name: t.bfloat16() for name, t in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    loaded = build_model(str(folder), seed=0)
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("removed", "said"),
    [
        (["config.json"], "no config.json"),
        (["model.safetensors"], "no model.safetensors"),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer"),
    ],
)
def test_a_folder_without_a_part_is_refused(folder: Path, removed: list[str], said: str) -> None:
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    refused(str(folder), said)


def test_pickled_weights_are_not_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(str(folder), "pickled weights are not loaded")


def test_incomplete_weights_are_refused_not_filled_with_noise(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["transformer.h.2.mlp.c_fc.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refused(str(folder), "transformer.h.2.mlp.c_fc.weight")


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: (f / "config.json").write_text("{"),
        lambda f: (f / "config.json").write_text('{"model_type": "no-such-model"}'),
        lambda f: (f / "config.json").write_text('{"model_type": "t5"}'),
        lambda f: (f / "model.safetensors").write_bytes(b"not a tensor file"),
        lambda f: shutil.copyfile(f / "config.json", f / "model.safetensors"),
    ],
)
def test_damaged_folders_are_refused(folder: Path, damage: Any) -> None:
    damage(folder)
    refused(str(folder), str(folder))


def test_weights_of_another_shape_are_refused(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"n_embd": 64}))
    refused(str(folder), str(folder))


def test_too_short_a_context_is_refused(folder: Path) -> None:
    build_model(str(folder), seed=0, max_seq_len=16)
    with pytest.raises(ModelError, match="at most 16 tokens and 17"):
        build_model(str(folder), seed=0, max_seq_len=17)


def test_folder_dropout_is_kept(tmp_path: Path, tokenizer: Any) -> None:
    config = GPT2Config(
        vocab_size=257, n_positions=8, n_embd=8, n_layer=1, n_head=1, resid_pdrop=0.25,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert build_model(str(tmp_path), seed=0).config.resid_pdrop == 0.25


# -- names --------------------------------------------------------------------


def refused(spec: str, said: str) -> None:
    with pytest.raises(ModelError) as caught:
        build_model(spec, seed=0)
    message = str(caught.value)
    assert said in message
    assert "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("gpt2-nan", "did you mean 'gpt2-nano'"),
        ("someone/some-model", ", ".join(MODELS)),
        ("./no-such-folder", "does not exist"),
        ("/no/such/folder", "does not exist"),
        ("", "no model is named"),
    ],
)
def test_unknown_models_are_refused(spec: str, said: str) -> None:
    refused(spec, said)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights").touch()
    refused(str(tmp_path / "weights"), "is a file")


@pytest.mark.parametrize("sizes", [{"vocab_size": 0}, {"max_seq_len": -1}])
def test_impossible_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ModelError, match="use 1 or more"):
        build_model("gpt2-nano", seed=0, **sizes)
