from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_geo.errors import ModelError
from flower_geo.models import (
    AdapterSpec,
    adapter_state,
    attach,
    build_model,
    fold,
    load_adapter_state,
)
from flower_geo.models.fold import merged_state
from tests.models.conftest import NAMED
from tests.models.test_adapter import EMBEDDING, IDS, adapted

#: A module that is not square, and how large it is as [out, in].
ODD = {
    "gpt2-nano": ("transformer.h.1.mlp.c_fc", 512, 128),
    "llama-nano": ("model.layers.1.mlp.up_proj", 384, 128),
}
SQUARE = {
    "gpt2-nano": "transformer.h.0.attn.c_proj",
    "llama-nano": "model.layers.0.self_attn.q_proj",
}


def factors(out: int, in_: int, rank: int = 3, seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    b = torch.randn(out, rank, generator=draw)
    return b, torch.randn(rank, in_, generator=draw) / 10


def changed(name: str, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    module, out, in_ = ODD[name]
    return {module: factors(out, in_, seed=seed), SQUARE[name]: factors(128, 128, 5, seed + 1)}


def as_linear(model: Any, module: str) -> Tensor:
    """A module's weight as [out, in], whichever way round it is stored."""
    layer = model.get_submodule(module)
    layer = getattr(layer, "base_layer", layer)
    weight: Tensor = layer.weight.detach()
    return weight.clone() if isinstance(layer, nn.Linear) else weight.T.clone()


@pytest.mark.parametrize("name", NAMED)
def test_a_fold_adds_the_product_to_the_live_base(name: str) -> None:
    plain: Any = build_model(name, seed=0, vocab_size=64, max_seq_len=16)
    with_adapter = adapted(name)
    before = adapter_state(with_adapter)
    for model, inner in ((plain, plain), (with_adapter, with_adapter.get_base_model())):
        start = {module: as_linear(inner, module) for module in changed(name)}
        pointer = inner.get_input_embeddings().weight.clone()
        prefix = "base_model.model." if model is with_adapter else ""
        fold(model, {f"{prefix}{m}": pair for m, pair in changed(name).items()})
        for module, (b, a) in changed(name).items():
            assert torch.allclose(as_linear(inner, module), start[module] + b @ a, atol=1e-5)
        assert torch.equal(inner.get_input_embeddings().weight, pointer)
    assert torch.allclose(
        plain(input_ids=IDS).logits, with_adapter(input_ids=IDS).logits, atol=1e-5
    )
    after = adapter_state(with_adapter)
    assert all(torch.equal(after[n], before[n]) for n in before)


def test_three_folds_equal_the_mean_of_full_weights_round_by_round() -> None:
    name = "gpt2-nano"
    model = build_model(name, seed=0, vocab_size=64, max_seq_len=16)
    module = SQUARE[name]
    wanted = as_linear(model, module).double()
    for turn in range(3):
        b, a = factors(128, 128, 4, turn)
        fold(model, {module: (b, a)})
        wanted += b.double() @ a.double()
    assert (as_linear(model, module) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_bf16_base_takes_the_fp32_sum_rounded_once() -> None:
    model: Any = build_model("llama-nano", seed=0, vocab_size=64)
    model.to(torch.bfloat16)
    module, out, in_ = ODD["llama-nano"]
    b, a = factors(out, in_)
    wanted = (as_linear(model, module).float().addmm(b, a)).bfloat16()
    fold(model, {module: (b, a)})
    assert torch.equal(as_linear(model, module), wanted)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.layers.9.mlp.up_proj": (4, 4)}, "the model has no model.layers.9.mlp.up_proj"),
        ({"model.layers.1.mlp.up_proj": (128, 384)}, r"\[384, 128\].*B \(128, 3\).*A \(3, 384\)"),
        ({"model.norm": (128, 128)}, "LlamaRMSNorm; name linear layers"),
        ({"model.embed_tokens": (64, 128)}, "Embedding; name linear layers"),
        ({"lm_head": (64, 128)}, "lm_head: it shares its weight with model.embed_tokens"),
    ],
)
def test_what_cannot_be_folded_is_said_and_nothing_written(
    changes: dict[str, tuple[int, int]], said: str
) -> None:
    model = build_model("llama-nano", seed=0, vocab_size=64)
    good = {SQUARE["llama-nano"]: factors(128, 128)}
    before = as_linear(model, SQUARE["llama-nano"])
    with pytest.raises(ModelError, match=said) as error:
        fold(model, good | {name: factors(*shape) for name, shape in changes.items()})
    assert "\n" not in str(error.value)
    b, a = factors(384, 128)
    with pytest.raises(ModelError, match="NaN or infinity"):
        fold(model, good | {ODD["llama-nano"][0]: (b * torch.nan, a)})
    assert torch.equal(as_linear(model, SQUARE["llama-nano"]), before)


def test_a_quantised_base_is_refused_with_the_reason() -> None:
    model = build_model("llama-nano", seed=0, vocab_size=64)
    layer = model.get_submodule(SQUARE["llama-nano"])
    # as bitsandbytes stores it: whole numbers, no gradient
    packed = torch.zeros(128, 128, dtype=torch.int8)
    layer.weight = nn.Parameter(packed, requires_grad=False)
    with pytest.raises(ModelError, match=r"quantised weight holds no small change exactly.*svd"):
        fold(model, {SQUARE["llama-nano"]: factors(128, 128)})


@pytest.mark.parametrize("to_save", [False, True])
@pytest.mark.parametrize("name", NAMED)
def test_the_merged_state_is_base_plus_folds_plus_adapter(name: str, to_save: bool) -> None:
    spec: dict[str, Any] = {"rank_pattern": {SQUARE[name]: 7}, "rslora": True}
    if to_save:
        spec["modules_to_save"] = (EMBEDDING[name],)
    model = adapted(name, **spec)
    draw = torch.Generator().manual_seed(5)
    state = {
        n: t + torch.randn(t.shape, generator=draw) / 20 for n, t in adapter_state(model).items()
    }
    own = AdapterSpec(rank=4, alpha=8, **spec)
    merged = merged_state(model, state, changed(name))
    base = build_model(name, seed=0, vocab_size=64, max_seq_len=16)
    untouched = {n: t.clone() for n, t in base.state_dict().items()}
    target: Any = build_model(name, seed=1, vocab_size=64, max_seq_len=16)
    target.load_state_dict(merged)
    for module in changed(name):
        b, a = changed(name)[module]
        low = f"base_model.model.{module}.lora_"
        wanted = as_linear(base, module) + b @ a
        wanted += own.scale_of(module) * state[f"{low}B.weight"] @ state[f"{low}A.weight"]
        found = as_linear(target, module)
        assert (found - wanted).norm() < 1e-5 * wanted.norm()
    for n, t in base.state_dict().items():
        assert torch.equal(t, untouched[n])
    fold(model, changed(name))
    load_adapter_state(model, state)
    live = model.eval()(input_ids=IDS).logits
    assert torch.allclose(target.eval()(input_ids=IDS).logits, live, atol=2e-4)
    embedding = next(t for n, t in merged.items() if EMBEDDING[name] in n)
    assert merged["lm_head.weight"].data_ptr() == embedding.data_ptr(), "tied in the file, too"


def test_merging_refuses_a_fold_for_no_module() -> None:
    model = adapted()
    with pytest.raises(ModelError, match="it has no nothing"):
        merged_state(model, adapter_state(model), {"nothing": factors(2, 2)})


def test_folding_before_and_after_attaching_is_the_same() -> None:
    plain = build_model("llama-nano", seed=0, vocab_size=64, max_seq_len=16)
    fold(plain, changed("llama-nano"))
    late = attach(plain, AdapterSpec(rank=4, alpha=8), 3)
    early = adapted("llama-nano")
    fold(early, changed("llama-nano"))
    assert torch.equal(late(input_ids=IDS).logits, early(input_ids=IDS).logits)
