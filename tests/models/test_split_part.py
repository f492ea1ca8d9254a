"""What a part owns, how it is named, with adapters, and what is refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flower_geo.errors import ModelError
from flower_geo.models import (
    AdapterSpec,
    adapter_parameters,
    adapter_state,
    attach,
    build_model,
    load_adapter_state,
    load_state,
    snapshot,
    trained_state,
)
from flower_geo.models.split import (
    Cut,
    Role,
    SplitPart,
    attach_part,
    check_cut,
    merge_states,
    split_part,
    split_parts,
    tied_names,
)
from tests.models.split_models import FAMILIES, VOCAB, batch, small_model
from tests.models.test_split_identity import assert_equal_training

SPEC = AdapterSpec(rank=2, alpha=4)
U_SHAPE = Cut(1, 1)


def logits_of(parts: Any, **given: Any) -> Any:
    hidden = batch("left")["input_ids"]
    mask = batch("left")["attention_mask"]
    for part in parts.values():
        hidden = part.run(hidden, mask)
    return hidden


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_states_of_parts_are_disjoint_subsets_of_the_whole_ones(family: str, tied: bool) -> None:
    model = small_model(family, tied=tied, layers=4)
    whole = trained_state(model)
    states = {role: trained_state(part) for role, part in split_parts(model, U_SHAPE).items()}
    names = [name for role in ("bottom", "middle") for name in states[role]]
    names += [name for name in states["top"] if not (tied and name in states["bottom"])]
    assert sorted(names) == sorted(whole)
    assert all(tensor is not None for tensor in states["middle"].values())
    shared = set(states["bottom"]) & set(states["top"])
    assert len(shared) == (1 if tied else 0)
    assert len(set(states["middle"])) == sum(".1." in n or ".2." in n for n in whole)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_the_cut_model_stays_whole_and_shares_every_layer(family: str) -> None:
    model = small_model(family)
    before = model(input_ids=batch("none")["input_ids"]).logits
    keys = list(model.state_dict())
    parts = split_parts(model, U_SHAPE)
    assert torch.equal(model(input_ids=batch("none")["input_ids"]).logits, before)
    assert list(model.state_dict()) == keys
    own = {id(p) for p in model.parameters()}
    assert {id(p) for part in parts.values() for p in part.parameters()} == own
    for part in parts.values():
        assert type(part.model) is type(model)
        assert part.model.config is model.config
        assert set(part.state_dict()) <= set(keys)
    assert not set(parts["middle"].state_dict()) & set(parts["bottom"].state_dict())
    assert (parts["top"].has_head, parts["middle"].has_head) == (True, False)
    # Hooks and modes of a part are its own.
    parts["middle"].model.register_forward_pre_hook(lambda *_: pytest.fail("not this one"))
    model(input_ids=batch("none")["input_ids"])


@pytest.mark.parametrize("adapter", [False, True], ids=["plain", "lora"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("role", ["bottom", "middle", "top"])
def test_a_part_keeps_nothing_it_does_not_own(family: str, role: Role, adapter: bool) -> None:
    whole = small_model(family, layers=4, tied=False)
    model = attach(whole, SPEC, 0) if adapter else whole
    whole(**batch("none")).loss.backward()
    decoder = whole.transformer if family == "gpt2" else whole.model
    layers = decoder.h if family == "gpt2" else decoder.layers
    part = split_part(model, Cut(1, 1), role)
    kept = {"bottom": [0], "middle": [1, 2], "top": [3]}[role]
    dropped = [weakref.ref(layer) for i, layer in enumerate(layers) if i not in kept]
    roots = [weakref.ref(thing) for thing in (model, whole, decoder, layers)]
    weights = [weakref.ref(whole.get_input_embeddings()), weakref.ref(whole.lm_head)]
    del model, whole, decoder, layers
    gc.collect()
    assert [ref() for ref in (*roots, *dropped)] == [None] * (4 + len(dropped))
    assert [ref() is not None for ref in weights] == [role == "bottom", role == "top"]
    left: Any = part.model
    width = left.config.hidden_size
    inputs = torch.ones(1, 3, dtype=torch.long) if role == "bottom" else torch.ones(1, 3, width)
    assert part.run(inputs).shape == (1, 3, VOCAB if role == "top" else width)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_names_are_those_both_sides_hold(tied: bool) -> None:
    model = small_model("gpt2", tied=tied)
    name = {"transformer.wte.weight"} if tied else set()
    for role, part in split_parts(model, Cut(1)).items():
        assert tied_names(part) == name, role
        assert tied_names(part) <= set(trained_state(part))
    u_shape = split_parts(model, U_SHAPE)
    assert not any(tied_names(part) for part in u_shape.values())
    bottom, top = (dict(u_shape[role].named_parameters()) for role in ("bottom", "top"))
    shared = set(map(id, bottom.values())) & set(map(id, top.values()))
    assert len(shared) == (1 if tied else 0)


@pytest.mark.parametrize("cut", [Cut(1), U_SHAPE, Cut(0)], ids=["vanilla", "u-shape", "embeddings"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_split_merge_reload_is_the_unsplit_model(
    family: str, tied: bool, cut: Cut, tmp_path: Path
) -> None:
    model = small_model(family, tied=tied, seed=1)
    parts = {role: split_part(small_model(family, tied=tied), cut, role) for role in cut.roles}
    names = list(trained_state(model))
    whole = snapshot(model)
    for part in parts.values():
        load_state(part, {name: whole[name] for name in trained_state(part)})
    merged = merge_states(*(snapshot(part) for part in parts.values()), names=names)
    assert list(merged) == names
    again = small_model(family, tied=tied, seed=2)
    load_state(again, merged)
    again.save_pretrained(tmp_path)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    expected = model.eval()(input_ids=batch("none")["input_ids"]).logits
    assert torch.equal(loaded.eval()(input_ids=batch("none")["input_ids"]).logits, expected)


def test_states_that_make_no_model_are_refused() -> None:
    model = small_model("gpt2")
    bottom, middle = (snapshot(part) for part in split_parts(model, Cut(1)).values())
    assert len(merge_states(bottom, middle)) == len(trained_state(model))
    with pytest.raises(ModelError, match=r"lack transformer\.h\.1\.ln_1\.weight.* and 23 more"):
        merge_states(bottom, names=trained_state(model))
    with pytest.raises(ModelError, match="hold unknown"):
        merge_states(bottom, middle, names=bottom)
    middle["transformer.wte.weight"][0, 0] += 1
    with pytest.raises(ModelError, match=r"differ in transformer\.wte\.weight; merge all parts"):
        merge_states(bottom, middle)


@pytest.mark.parametrize("attached", ["whole", "part"])
@pytest.mark.parametrize("cut", [Cut(1), U_SHAPE], ids=["vanilla", "u-shape"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_lora_on_all_parts_is_lora_on_the_whole(family: str, cut: Cut, attached: str) -> None:
    # Rank stabilised, in two ranks: what PEFT matches by name must match in parts too.
    pattern = {"c_attn": 3} if family == "gpt2" else {"q_proj": 3}
    spec = AdapterSpec(rank=2, alpha=4, rslora=True, rank_pattern=pattern)
    whole = attach(small_model(family), spec, seed=7)
    if attached == "whole":
        parts = split_parts(attach(small_model(family), spec, seed=7), cut)
    else:
        base = split_parts(small_model(family), cut)
        parts = {role: attach_part(part, spec, seed=7) for role, part in base.items()}
    names = list(adapter_state(whole))
    peft: list[Any] = [part.model for part in parts.values()]
    states = [adapter_state(model) for model in peft]
    merged = merge_states(*states, names=names)
    assert all(torch.equal(merged[n], t) for n, t in adapter_state(whole).items())
    assert sum(map(len, states)) == len(names)
    # B = 0 would leave A without a gradient and hide what is wrong with it.
    generator = torch.Generator().manual_seed(0)
    moved = {n: torch.randn(t.shape, generator=generator) / 4 for n, t in merged.items()}
    load_adapter_state(whole, moved)
    for model in peft:
        load_adapter_state(model, {n: moved[n] for n in adapter_parameters(model)})
    assert_equal_training(whole, parts, "left")


def test_lora_dropout_draws_the_same_in_parts() -> None:
    spec = AdapterSpec(rank=2, alpha=4, dropout=0.4)
    whole = attach(small_model("llama"), spec, seed=7)
    parts = split_parts(attach(small_model("llama"), spec, seed=7), U_SHAPE)
    assert_equal_training(whole, parts, "none")


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_tied_embeddings_that_an_adapter_trains_whole(family: str) -> None:
    embedding = "wte" if family == "gpt2" else "embed_tokens"
    spec = AdapterSpec(rank=2, alpha=4, modules_to_save=(embedding,))
    whole = attach(small_model(family), spec, seed=7)
    models = [attach(small_model(family), spec, seed=7) for _ in range(2)]
    parts = {
        role: split_part(model, Cut(1), role)
        for model, role in zip(models, Cut(1).roles, strict=True)
    }
    trained = [tied_names(part) & set(trained_state(part)) for part in parts.values()]
    assert trained[0] == trained[1]
    assert len(trained[0]) == 1
    assert_equal_training(whole, parts, "right")
    with pytest.raises(ModelError, match="attach the adapter to the whole model"):
        attach_part(split_part(small_model(family), Cut(1), "bottom"), spec, seed=7)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_no_logits_where_there_is_no_head(family: str) -> None:
    model = small_model(family)
    widths: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda *a: widths.append(a[2].shape[-1]))
    parts = split_parts(model, U_SHAPE)
    hidden = parts["middle"].run(parts["bottom"].run(batch("none")["input_ids"]))
    assert (widths, hidden.shape[-1]) == ([], 16)
    parts["top"].run(hidden)
    assert widths == [VOCAB]
    handle.remove()


def test_named_models_are_cut_too() -> None:
    for name in ("gpt2-pico", "llama-pico"):
        model = build_model(name, seed=0, vocab_size=VOCAB)
        parts = split_parts(model, Cut(1))
        assert torch.equal(logits_of(parts), model(**batch("left"), use_cache=False).logits)


@pytest.mark.parametrize(
    ("cut", "says"),
    [
        (Cut(3), "3 bottom and 0 top layers .* none of the model's 3 .* at most 2 at the site"),
        (Cut(1, 2), "1 bottom and 2 top layers"),
        (Cut(99, 99), "99 bottom and 99 top"),
        (Cut(-1), "bottom layers at the site are -1; use a whole number"),
        (Cut(1, -1), "top layers at the site are -1"),
        (Cut(True), "bottom layers at the site are True"),
        (Cut(1.0), "bottom layers at the site are 1.0"),  # type: ignore[arg-type]
    ],
)
def test_cuts_beyond_the_layers_are_refused(cut: Cut, says: str) -> None:
    model = small_model("llama")
    with pytest.raises(ModelError, match=says) as caught:
        check_cut(model.config, cut)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match=says):
        split_part(model, cut, "bottom")


def test_other_families_and_other_roles_are_refused() -> None:
    config = AutoConfig.for_model(
        "gpt_neox", vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=8, max_position_embeddings=8,
    )  # fmt: skip
    build: Any = AutoModelForCausalLM.from_config
    other = build(config)
    with pytest.raises(ModelError, match=r"a gpt_neox model cannot be cut .* gpt2, llama"):
        split_part(other, Cut(1), "bottom")
    with pytest.raises(ModelError, match="0 top layers makes no top part"):
        split_part(small_model("gpt2"), Cut(1), "top")


def test_inputs_of_the_wrong_kind_are_refused() -> None:
    parts: dict[Role, SplitPart] = split_parts(small_model("gpt2"), Cut(1))
    ids, hidden = torch.ones(1, 3, dtype=torch.long), torch.ones(1, 3, 16)
    for role, inputs in [
        ("bottom", hidden), ("bottom", ids[0]), ("middle", ids), ("middle", hidden[..., :8]),
        ("middle", hidden[0]),
    ]:  # fmt: skip
        with pytest.raises(ModelError, match=f"the {role} part got torch"):
            parts[role].run(inputs)  # type: ignore[index]
    assert torch.equal(parts["middle"](hidden), parts["middle"].run(hidden))
