"""Training in parts gives the bits of training the whole."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_geo.models import trained_state
from flower_geo.models.split import Cut, SplitPart, merge_states, split_part, split_parts
from flower_geo.models.split.part import tied_names
from tests.models.split_models import FAMILIES, PADDINGS, batch, small_model

VANILLA, U_SHAPE = Cut(1), Cut(1, 1)
CUTS = pytest.mark.parametrize("cut", [VANILLA, U_SHAPE], ids=["vanilla", "u-shape"])


def loss_of(model: Any, logits: Tensor, labels: Tensor) -> Any:
    loss: Any = model.loss_function(logits, labels, vocab_size=model.config.vocab_size)
    return loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=0.02, weight_decay=0.1)


def forward_backward(
    parts: Mapping[Any, SplitPart], given: Mapping[str, Tensor], positions: Tensor | None = None
) -> Tensor:
    """As over a wire: every part sees only a detached copy of what the part below sent."""
    sent: list[Tensor] = []
    received: list[Tensor] = []
    inputs = given["input_ids"]
    for part in parts.values():
        sent.append(part.run(inputs, given.get("attention_mask"), positions))
        inputs = sent[-1].detach().clone().requires_grad_(True)
        received.append(inputs)
    model: Any = next(iter(parts.values())).model
    loss = loss_of(model, sent[-1], given["labels"])
    loss.backward()
    for out, below in zip(reversed(sent[:-1]), reversed(received[:-1]), strict=True):
        assert below.grad is not None
        torch.autograd.backward(out, below.grad.clone())
    detached: Tensor = loss.detach()
    return detached


def train_whole(model: Any, batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    losses, gradients = [], []
    for given in batches:
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        loss = loss_of(model, model(**inputs, use_cache=False).logits, given["labels"])
        loss.backward()
        losses.append(loss.detach())
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def two_sides(family: str, cut: Cut, **options: Any) -> dict[Any, SplitPart]:
    """Parts as two processes have them: the cloud's are cut from a model of its own."""
    site, cloud = (split_parts(small_model(family, **options), cut) for _ in range(2))
    return {role: (cloud if role == "middle" else site)[role] for role in cut.roles}


def exchange_tied(parts: Mapping[Any, SplitPart]) -> None:
    """What an engine does before a step: both copies of a tied weight take the sum."""
    held: dict[str, list[nn.Parameter]] = {}
    for part in parts.values():
        for name, parameter in part.named_parameters():
            if name in tied_names(part) and parameter.grad is not None:
                held.setdefault(name, []).append(parameter)
    for copies in held.values():
        assert len(copies) == 2
        total = copies[0].grad + copies[1].grad  # type: ignore[operator]
        for parameter in copies:
            parameter.grad = total.clone()


def train_parts(
    parts: Mapping[Any, SplitPart], batches: list[dict[str, Tensor]]
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    own = {id(p): p for part in parts.values() for p in part.parameters() if p.requires_grad}
    optimizer = adamw(own.values())
    losses, gradients = [], []
    for given in batches:
        losses.append(forward_backward(parts, given))
        exchange_tied(parts)
        gradients.append(
            merge_states(
                *(
                    {n: p.grad.clone() for n, p in part.named_parameters() if p.grad is not None}
                    for part in parts.values()
                )
            )
        )
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def assert_equal_training(whole: Any, parts: Mapping[Any, SplitPart], padding: str) -> None:
    batches = [batch(padding, seed) for seed in range(3)]
    torch.manual_seed(5)
    losses, gradients = train_whole(whole, batches)
    torch.manual_seed(5)
    own_losses, own_gradients = train_parts(parts, batches)
    assert [float(a) for a in losses] == [float(a) for a in own_losses]
    names = list(trained_state(whole))
    flat = [step[name] for step in own_gradients for name in names]
    assert all(torch.equal(a, b) for a, b in zip(gradients, flat, strict=True))
    merged = merge_states(*(trained_state(part) for part in parts.values()), names=names)
    for name, tensor in trained_state(whole).items():
        assert torch.equal(tensor, merged[name]), name


@CUTS
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_three_steps_are_equal_to_the_bit(
    family: str, attention: str, tied: bool, padding: str, cut: Cut
) -> None:
    options: dict[str, Any] = {"attention": attention, "tied": tied}
    whole = small_model(family, **options)
    assert_equal_training(whole, two_sides(family, cut, **options), padding)


@CUTS
@pytest.mark.parametrize("family", FAMILIES[2:])
def test_other_families_too(family: str, cut: Cut) -> None:
    extra: dict[str, Any] = {"layers": 4}
    if family == "mistral":
        extra |= {"sliding_window": 4}
    elif family == "qwen2":  # a mask of its own for some layers, by index
        extra |= {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2}
    whole = small_model(family, **extra)
    if family == "qwen2":
        assert set(whole.config.layer_types) == {"full_attention", "sliding_attention"}
    assert_equal_training(whole, two_sides(family, cut, **extra), "left")


@CUTS
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_dropout_of_parts_in_order_draws_what_the_whole_draws(
    family: str, attention: str, cut: Cut
) -> None:
    options: dict[str, Any] = {"dropout": 0.3, "attention": attention}
    whole = small_model(family, **options)
    torch.manual_seed(1)
    first = whole(**batch("none")).loss
    assert not torch.equal(first, whole(**batch("none")).loss)  # it does draw
    assert_equal_training(whole, two_sides(family, cut, **options), "right")


@CUTS
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_positions_of_the_caller_and_packed_sequences(family: str, cut: Cut) -> None:
    model = small_model(family)
    ids = batch("none")["input_ids"]
    mask = batch("left")["attention_mask"]
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    counted = (mask.cumsum(1) - 1).clamp(min=0)
    parts = split_parts(model, cut).values()
    for given, positions in ((None, packed), (mask, counted)):
        hidden = ids
        for part in parts:
            hidden = part.run(hidden, given, positions)
        expected = model(
            input_ids=ids, attention_mask=given, position_ids=positions, use_cache=False
        ).logits
        assert torch.equal(hidden, expected)
        plain = model(input_ids=ids, attention_mask=given, use_cache=False).logits
        assert not torch.equal(expected, plain)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_every_cut_gives_the_whole_models_logits(family: str) -> None:
    model = small_model(family, layers=4)
    ids = batch("none")["input_ids"]
    expected = model(input_ids=ids).logits
    for bottom in range(4):
        for top in range(4 - bottom):
            hidden = ids
            for part in split_parts(model, Cut(bottom, top)).values():
                hidden = part.run(hidden)
            assert torch.equal(hidden, expected), (bottom, top)


def test_gradient_checkpointing_changes_no_bit() -> None:
    for family in ("gpt2", "llama"):
        whole = small_model(family)
        parts = two_sides(family, U_SHAPE)
        for part in parts.values():
            part.model.activation_checkpointing_enable()  # type: ignore[operator]
        assert_equal_training(whole, parts, "right")


def test_signs_of_zeros_pass_the_bypassed_position_embeddings() -> None:
    middle = split_part(small_model("gpt2", layers=2), Cut(0), "middle")
    seen: list[Tensor] = []
    decoder: Any = middle.model.transformer
    decoder.h[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    hidden = torch.tensor([-0.0, 0.0] * 8).expand(1, 3, 16).contiguous()
    middle.run(hidden)
    assert torch.equal(torch.signbit(seen[0]), torch.signbit(hidden))
