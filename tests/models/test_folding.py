"""A frozen base under factors that come and go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.models import AdapterSpec, attach, build_model
from flower_geo.models.adapter import lora_layers
from flower_geo.models.adapter_targets import is_transposed
from flower_geo.models.folding import FoldedBase

Fold = tuple[str, Tensor, Tensor]


@pytest.fixture(params=["llama-nano", "gpt2-nano"])
def model(request: pytest.FixtureRequest) -> Any:
    base = build_model(request.param, seed=0, vocab_size=64, max_seq_len=16)
    return attach(base, AdapterSpec(rank=2), 0)


def pairs(model: Any, count: int) -> dict[str, Fold]:
    name, layer = next(iter(lora_layers(model).items()))
    maker = torch.Generator().manual_seed(1)
    return {
        f"fold.{index:06d}.{name}": (
            f"base_model.model.{name}",
            0.01 * torch.randn(layer.out_features, 3, generator=maker),
            torch.randn(3, layer.in_features, generator=maker),
        )
        for index in range(count)
    }


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(12)[None]).logits
    return found


def weight(model: Any) -> Tensor:
    layer = next(iter(lora_layers(model).values()))
    found: Tensor = layer.get_base_layer().weight.detach().clone()
    return found


def test_the_base_holds_the_sum_and_gives_it_back(model: Any) -> None:
    own, before = weight(model), logits(model)
    folds = pairs(model, 3)
    base = FoldedBase(model)
    base.hold(folds)
    added = sum(b @ a for _, b, a in folds.values())
    assert isinstance(added, Tensor)
    layer = next(iter(lora_layers(model).values())).get_base_layer()
    wanted = own + (added.T if is_transposed(layer) else added)
    torch.testing.assert_close(weight(model), wanted)
    assert not torch.allclose(logits(model), before)
    base.hold({})
    assert torch.equal(weight(model), own) and torch.equal(logits(model), before)


def test_the_way_there_does_not_matter(model: Any) -> None:
    folds = pairs(model, 4)
    keys = sorted(folds)
    base = FoldedBase(model)
    base.hold(folds)
    straight = weight(model)
    for some in (keys[:1], keys[:3], keys[1:2], [keys[0], keys[2]], keys[:2], keys):
        base.hold({key: folds[key] for key in some})
    assert torch.equal(weight(model), straight)


def test_a_key_with_other_factors_replaces_them(model: Any) -> None:
    folds = pairs(model, 2)
    base = FoldedBase(model)
    base.hold(folds)
    first = weight(model)
    changed = {key: (module, 2 * b, a) for key, (module, b, a) in folds.items()}
    base.hold(changed)
    assert not torch.equal(weight(model), first)
    base.hold(folds)
    assert torch.equal(weight(model), first)
