from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.models import leak_attacks
from flower_geo.models.leak_attacks import activations, dictionary, replay, unlike
from flower_geo.models.split import Cut, SplitPart, noise_generator, noised, split_part
from tests.models.split_models import FAMILIES, VOCAB, small_model


def bottom_of(model: Any, layers: int = 2) -> SplitPart:
    return split_part(model.eval(), Cut(layers), "bottom")


def ids(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("start", [0, 5])
@torch.no_grad()
def test_many_tokens_in_one_forward_are_as_each_by_itself(
    family: str, attention: str, start: int
) -> None:
    bottom = bottom_of(small_model(family, attention=attention))
    before, tried = ids(2, start), ids(2, 7, seed=1)
    together = leak_attacks._behind(bottom, before, tried)
    for place in range(7):
        alone = activations(bottom, torch.cat([before, tried[:, place, None]], 1))[:, -1]
        assert torch.allclose(together[:, place], alone, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 9, 32])
def test_anchors_stand_for_every_place_once(length: int) -> None:
    for count in range(min(2, length), length + 1):
        groups = [*leak_attacks._anchors(length, count)]
        assert len(groups) == count and groups[0] == (0, [0])
        assert [place for _, places in groups for place in places] == [*range(length)]
        assert all(anchor in places for anchor, places in groups)
        sizes = [len(places) for _, places in groups[1:]]
        assert not sizes or max(sizes) - min(sizes) <= 1


@torch.no_grad()
def test_a_dictionary_with_few_places_finds_nearly_as_much(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("gpt2")
    bottom, text, public = bottom_of(model, 1), ids(6, 12), ids(9, 12, seed=1)
    sent = activations(bottom, text)[None]

    def found() -> float:
        return float((dictionary(bottom, sent, public, 1)[:, 0] == text.flatten()).float().mean())

    every = found()
    monkeypatch.setattr(leak_attacks, "ENTRIES", 4 * VOCAB)
    assert every > 0.6 and found() > every - 0.25


@torch.no_grad()
def test_what_noise_and_codec_change_is_measured() -> None:
    bottom = bottom_of(small_model("llama"))
    codecs: list[Callable[[Tensor], Tensor]] = [lambda x: x, lambda x: x * 0.9]
    plain, scaled = (
        unlike(bottom, [0.0, 0.5], coded, ids(40, 8), [noise_generator(0), noise_generator(1)])
        for coded in codecs
    )
    assert torch.all(plain[0] <= 2 * leak_attacks.ROUNDING)
    assert torch.allclose(plain[1], torch.full((16,), 0.25), rtol=0.4)
    assert float(plain[1].mean()) == pytest.approx(0.25, rel=0.1)
    assert 1e-3 < float(scaled[0].mean()) < 2e-2


@torch.no_grad()
def test_the_replay_finds_only_what_it_tries_or_expects() -> None:
    model = small_model("llama")
    bottom, text = bottom_of(model), ids(4, 6)
    sent = activations(bottom, text)[None]
    variances = torch.full((1, 16), 1e-8)
    right = replay(bottom, model, sent, variances, text.reshape(-1, 1))
    assert torch.equal(right.view(4, 6), text)
    wrong = ((text + 1) % VOCAB).reshape(-1, 1)
    assert (replay(bottom, model, sent, variances, wrong).view(4, 6) == text).float().mean() < 0.3


@torch.no_grad()
def test_under_noise_the_public_model_helps() -> None:
    """Text that the model itself expects is found better with its expectation than without."""
    model = small_model("llama")
    bottom = bottom_of(model)
    text = ids(12, 1)
    for _ in range(9):
        text = torch.cat([text, model(input_ids=text).logits[:, -1].argmax(-1, keepdim=True)], 1)
    sent = noised(activations(bottom, text), 2.0, noise_generator(0))[None]

    def found(whole: Any) -> float:
        tokens = replay(bottom, whole, sent, torch.full((1, 16), 4.0), None)
        return float((tokens.view(12, 10)[:, 1:] == text[:, 1:]).float().mean())

    flat = small_model("llama")
    flat.lm_head = torch.nn.Linear(16, VOCAB, bias=False)
    torch.nn.init.zeros_(flat.lm_head.weight)
    assert found(model) > found(flat.eval()) + 0.05
