from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.errors import ModelError
from flower_geo.models import AdapterSpec, attach, build_model
from flower_geo.models.split import Cut, PartSize, part_sizes, split_parts
from tests.models.split_models import FAMILIES, small_model

SPECS = ["gpt2-pico", "llama-pico"]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("cut", [Cut(1), Cut(0), Cut(0, 1)], ids=["1", "0", "u-shape"])
def test_counts_are_those_of_the_real_parts(spec: str, cut: Cut) -> None:
    sizes = part_sizes(spec, cut, AdapterSpec(rank=3))
    peft: Any = attach(build_model(spec, seed=0), AdapterSpec(rank=3), seed=0)
    assert [*sizes] == [*cut.roles, "whole"]
    for role, part in [*split_parts(peft, cut).items(), ("whole", peft)]:
        values = [(p.numel(), p.requires_grad) for p in part.parameters()]
        assert sizes[role].trained == sum(n for n, trains in values if trains)
        assert sizes[role].frozen == sum(n for n, trains in values if not trains)
    assert sum(sizes[role].layers for role in cut.roles) == sizes["whole"].layers == 2


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_that_can_be_cut_is_sized(family: str, tmp_path: Path) -> None:
    small_model(family, tied=False).save_pretrained(tmp_path)
    sizes = part_sizes(str(tmp_path), Cut(1, 1))
    whole = sizes.pop("whole")
    for name in ("trained", "layers", "products", "attended", "head"):
        assert sum(getattr(size, name) for size in sizes.values()) == getattr(whole, name)
    assert sum(size.frozen for size in sizes.values()) == whole.frozen
    assert sizes["top"].head == 48 and not sizes["bottom"].head


@pytest.mark.parametrize("spec", SPECS)
def test_flops_are_what_torch_counts(spec: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    size, length = part_sizes(spec, Cut(1), AdapterSpec(rank=4))["whole"], 16
    peft: Any = attach(build_model(spec, seed=0), AdapterSpec(rank=4), seed=0)
    ids = torch.zeros(2, length, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter:
        peft(input_ids=ids, use_cache=False)
    counted = counter.get_total_flops() / ids.numel()
    # torch counts attention as if it were not causal, or, of a kernel it does not know, not at all
    most = size.forward_flops(length) + 2 * size.attended * length
    assert size.forward_flops(length) - 2 * size.attended * length <= counted <= 1.001 * most


def test_a_frozen_base_takes_as_long_back_as_forth() -> None:
    size = PartSize(frozen=9, trained=0, layers=1, width=4, head=0, products=100, attended=0)
    assert size.forward_flops(8) == size.backward_flops(8) == 200


def test_memory_grows_with_the_tokens_kept_and_the_head() -> None:
    size = part_sizes("gpt2-small", Cut(2))
    bottom, middle = size["bottom"], size["middle"]
    assert bottom.memory(0) == 4 * (bottom.frozen + 4 * bottom.trained)
    assert bottom.memory(20) - bottom.memory(10) == bottom.memory(10) - bottom.memory(0) > 0
    assert middle.memory(1) - middle.memory(0) > 3 * 4 * 50257
    assert size["whole"].memory(100) > middle.memory(100) > bottom.memory(100)


@pytest.mark.parametrize(
    ("spec", "cut", "said"),
    [
        ("gpt2-pico", Cut(2), "leave none"),
        ("gpt2-pica", Cut(1), "did you mean 'gpt2-pico'"),
    ],
    ids=["too deep", "unknown"],
)
def test_what_cannot_be_cut_is_refused(spec: str, cut: Cut, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        part_sizes(spec, cut)
