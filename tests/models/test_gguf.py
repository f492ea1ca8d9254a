from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.errors import ModelError
from flower_geo.models import (
    AdapterSpec,
    adapter_state,
    attach,
    base_identity,
    build_model,
    export_merged,
    gguf_tokenizer,
    parameter_count,
)
from flower_geo.models.build import first_layers

ROOT = Path(__file__).resolve().parents[2]
IDS = torch.arange(12)[None]


def by_halves(weight: Tensor, heads: int) -> Tensor:
    """Rows of a query or key matrix as GGUF orders them: rotary pairs side by side."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
OUTSIDE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}


@pytest.fixture(scope="module")
def plain(tokenizer: Any) -> Any:
    return build_model("llama-nano", seed=4, vocab_size=len(tokenizer))


@pytest.fixture(scope="module")
def file(plain: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The nano model as llama.cpp writes one: fp32, with its tokenizer."""
    gguf = pytest.importorskip("gguf")
    config = plain.config
    path = tmp_path_factory.mktemp("gguf") / "nano.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("nano")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    vocab = tokenizer.get_vocab()
    writer.add_tokenizer_model("gpt2")
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_token_list([*tokens[:-1], "ab"])
    writer.add_token_types([3] + [1] * (len(vocab) - 1))
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_chat_template("{{ messages }}")
    for name, tensor in plain.named_parameters():
        value, target = tensor.detach(), OUTSIDE.get(name)
        if target is None:
            _, _, number, rest = name.split(".", 3)
            target = f"blk.{number}.{NAMES[rest.removesuffix('.weight')]}.weight"
            if rest.startswith("self_attn.q_proj"):
                value = by_halves(value, config.num_attention_heads)
            elif rest.startswith("self_attn.k_proj"):
                value = by_halves(value, config.num_key_value_heads)
        writer.add_tensor(target, value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_is_a_model(file: Path, plain: Any, capfd: pytest.CaptureFixture[str]) -> None:
    loaded: Any = build_model(str(file), seed=0, max_seq_len=128)
    assert not any(capfd.readouterr())
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    assert torch.equal(loaded(input_ids=IDS).logits, plain(input_ids=IDS).logits)
    assert parameter_count(str(file)) == parameter_count("llama-nano", 257)
    cut: Any = first_layers(str(file), 2)
    assert cut.config.num_hidden_layers == 2
    with pytest.raises(ModelError, match="takes at most 256 tokens"):
        build_model(str(file), seed=0, max_seq_len=257)


def test_it_is_adapted_and_exported_like_any_other(
    file: Path, tokenizer: Any, tmp_path: Path
) -> None:
    loaded: Any = attach(build_model(str(file), seed=0), AdapterSpec(rank=2), 0)
    loaded(input_ids=IDS, labels=IDS).loss.backward()
    export_merged(loaded, adapter_state(loaded), tokenizer, tmp_path / "m")
    again: Any = build_model(str(tmp_path / "m"), seed=0)
    assert torch.allclose(again(input_ids=IDS).logits, loaded(input_ids=IDS).logits, atol=1e-5)


def test_its_tokenizer_and_identity_are_its_own(file: Path, tmp_path: Path) -> None:
    tokenizer: Any = gguf_tokenizer(str(file))
    assert tokenizer.eos_token == "<|end|>"
    assert len(tokenizer.encode("abab")) == 2
    assert tokenizer.chat_template == "{{ messages }}"
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(file.read_bytes())
    ours = base_identity(str(file), tokenizer)
    assert base_identity(str(copy), tokenizer) == ours
    changed = bytearray(file.read_bytes())
    changed[-5] ^= 1
    copy.write_bytes(changed)
    assert base_identity(str(copy), tokenizer)["weights"] != ours["weights"]


def test_what_is_no_gguf_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"GGUF file .* cannot be read: No such file"):
        build_model(str(tmp_path / "absent.gguf"), seed=0)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 and so on")
    for load in (gguf_tokenizer, parameter_count):
        with pytest.raises(ModelError, match="is no GGUF file"):
            load(str(other))


def test_a_broken_file_is_said_in_one_line(file: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(file.read_bytes()[:2000])
    with pytest.raises(ModelError, match="cannot be loaded") as error:
        build_model(str(short), seed=0)
    assert "\n" not in str(error.value)
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        gguf_tokenizer(str(short))


def test_without_the_package_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "some.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"needs the gguf package; run pip install .flower"):
        build_model(str(path), seed=0)


def test_the_fetching_tool_refuses_before_it_fetches(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "config.json").write_text("{}")
    for arguments, code, said in (
        (["--layers", "31"], 2, "--layers 31 is not from 1 to 30"),
        (["--folder", str(tmp_path / "there")], 0, "is there already"),
    ):
        command = [sys.executable, "tools/fetch_smollm2.py", *arguments]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        assert said in done.stdout + done.stderr
