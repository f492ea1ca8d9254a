from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.errors import ConfigError, DataError, ModelError
from flower_geo.models.adapter import attach
from flower_geo.models.adapter_spec import AdapterSpec
from flower_geo.models.leak import Attack, Leak, measure_leak
from tests.models.split_models import VOCAB, small_model

#: The replay tries every token.
WHOLE = Attack(candidates=VOCAB)


def text(rows: int = 4, length: int = 8, seed: int = 5) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["gpt2", "llama", "qwen3"])
def test_without_noise_the_text_comes_back_whole(family: str) -> None:
    found = measure_leak(small_model(family), text(), [0, 1, 2], attack=WHOLE)
    assert [leak.cut for leak in found] == [0, 1, 2]
    assert [leak.replay for leak in found] == [1.0] * 3 == [leak.best for leak in found]
    assert found[0].dictionary == 1.0 > found[2].dictionary
    assert found[0].tokens == 32 and found[0].linear is None


def test_noise_hides_the_text() -> None:
    found = measure_leak(small_model("llama"), text(8), [1], [0.0, 1.0, 100.0], attack=WHOLE)
    quiet, some, loud = found
    assert quiet.best == 1.0 > some.best > loud.best
    assert loud.best < 0.2
    assert [leak.noise for leak in found] == [0.0, 1.0, 100.0]


def test_a_map_learned_on_public_text_finds_more_than_the_nearest_embedding() -> None:
    attack = Attack(public=text(200, seed=6), replay=False)
    (leak,) = measure_leak(small_model("gpt2"), text(), [1], attack=attack)
    assert leak.linear is not None and leak.linear > leak.nearest + 0.2
    assert leak.replay is None
    assert leak.best == max(leak.nearest, leak.dictionary, leak.linear)


def test_the_attacker_sees_what_the_codec_leaves() -> None:
    model = small_model("llama")
    seen: list[tuple[int, ...]] = []

    def nothing(hidden: Tensor) -> Tensor:
        seen.append(tuple(hidden.shape))
        return torch.zeros_like(hidden)

    (leak,) = measure_leak(model, text(), [1], coded=nothing)
    assert leak.best < 0.2
    assert seen[0] == (4, 8, 16) and {shape[2] for shape in seen} == {16}


def strange_adapter(model: Any, size: float) -> Any:
    peft: Any = attach(model, AdapterSpec(rank=4), seed=0)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return peft


def test_an_adapter_that_the_attacker_has_not_hides_something() -> None:
    model = strange_adapter(small_model("llama"), 3.0)
    (base,) = measure_leak(model, text(), [2], attack=WHOLE)
    (full,) = measure_leak(model, text(), [2], attack=replace(WHOLE, knows_adapter=True))
    assert full.best == 1.0 > base.best
    assert not any(getattr(part, "_disable_adapters", False) for part in model.modules())


def test_an_untrained_adapter_changes_nothing() -> None:
    plain = measure_leak(small_model("gpt2"), text(), [1], [0.3])
    peft: Any = attach(small_model("gpt2"), AdapterSpec(rank=2), seed=0)
    assert measure_leak(peft, text(), [1], [0.3]) == plain


def test_equal_arguments_give_equal_figures_and_nothing_else_moves() -> None:
    model = small_model("gpt2", dropout=0.3)
    before = torch.random.get_rng_state()

    def once(seed: int) -> list[Leak]:
        attack = Attack(public=text(50, seed=6))
        return measure_leak(model, text(), [1, 2], [0.0, 0.4], attack=attack, seed=seed)

    first = once(0)
    assert once(0) == first and once(1) != first
    assert model.training
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_level_has_its_noise_whatever_the_others() -> None:
    model = small_model("llama")
    both = measure_leak(model, text(), [1, 2], [0.2, 0.8])
    assert measure_leak(model, text(), [2], [0.8]) == both[-1:]


def test_a_row_of_one_token_is_attacked_too() -> None:
    (leak,) = measure_leak(small_model("gpt2"), text(6, 1), [2], attack=WHOLE)
    assert leak.best == 1.0 and leak.tokens == 6


@pytest.mark.parametrize(
    ("ids", "cuts", "noises", "error", "said"),
    [
        (text(), [3], [0.0], ModelError, "leave none"),
        (text(), [-1], [0.0], ModelError, "bottom layers"),
        (text(), [1], [-1.0], ConfigError, "activation noise"),
        (text()[:0], [1], [0.0], DataError, "no text to attack"),
    ],
    ids=["too deep", "negative", "noise", "no text"],
)
def test_what_cannot_be_measured_is_refused(
    ids: Tensor, cuts: list[int], noises: list[float], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        measure_leak(small_model("gpt2"), ids, cuts, noises)
