"""What both inner loops must do with labelled batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.errors import TrainingError
from flower_geo.training import InnerConfig, InnerLoop, TrlLoop
from tests.training.conftest import (
    adapted,
    batches,
    equal,
    labelled,
    small,
    unlabelled,
    weights,
    with_dropout,
)

CONFIG = InnerConfig(lr=3e-3, warmup_steps=3, total_steps=20)
SGD = InnerConfig(lr=0.5, optimizer="sgd", clip_norm=0.0, weight_decay=0.0, schedule="constant")
both = pytest.mark.parametrize("kind", [InnerLoop, TrlLoop], ids=["lean", "trl"])


def from_list(values: list[Any]) -> Callable[[], Any]:
    stream: Iterator[Any] = iter(values)
    return lambda: next(stream)


# -- the two agree ------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [0.0, 0.1])
@pytest.mark.parametrize("source", [labelled, batches])
def test_both_loops_train_alike(accumulate: int, clip: float, source: Callable[..., Any]) -> None:
    # eps as large as a usual gradient: Adam blows rounding up where a gradient is nearly zero
    config = replace(CONFIG, grad_accum=accumulate, clip_norm=clip, prox_mu=0.3, eps=1e-3)
    lean, trl = adapted(small("llama-nano")), adapted(small("llama-nano"))
    before = weights(lean)
    loops = InnerLoop(lean, config), TrlLoop(trl, config)
    for position in (0, 4):  # two rounds: the trainer is kept
        one, other = (loop.run(source(seed=position), steps=4, position=position) for loop in loops)
        assert astuple(replace(one, seconds=0)) == pytest.approx(
            astuple(replace(other, seconds=0)), rel=1e-5
        )
    after = weights(lean)
    moved = max(float((after[n] - before[n]).abs().max()) for n in before)
    assert moved > 1e-3
    for name, tensor in weights(trl).items():
        torch.testing.assert_close(tensor, after[name], rtol=0, atol=1e-4 * moved)
    mine, theirs = (loop.state_dict() for loop in loops)
    assert mine.keys() == theirs.keys()


@both
def test_labels_of_every_token_are_the_plain_batch(kind: Any) -> None:
    plain, given = small(), small()
    whole = InnerLoop(plain, SGD).run(batches(), steps=3)
    source = batches()

    def mapping() -> dict[str, Tensor]:
        ids = source()
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    result = kind(given, SGD).run(mapping, steps=3)
    assert result.tokens == whole.tokens == 3 * 2 * 7
    assert result.loss_mean == pytest.approx(whole.loss_mean, rel=1e-6)
    for name, tensor in weights(given).items():
        torch.testing.assert_close(tensor, weights(plain)[name], rtol=0, atol=1e-6)


# -- tokens -------------------------------------------------------------------


@both
def test_sites_weighted_by_tokens_are_the_pooled_step(kind: Any) -> None:
    given = [labelled(seed=4, rows=1)(), labelled(seed=5, rows=4)()]
    sites, tokens = [], []
    for batch in given:
        model = adapted(small("llama-nano"))
        tokens.append(kind(model, SGD).run(lambda batch=batch: batch, steps=1).tokens)
        sites.append(weights(model))
    assert tokens == [int((batch["labels"][:, 1:] != -100).sum()) for batch in given]
    assert len(set(tokens)) == 2
    merged = {name: torch.cat([batch[name] for batch in given]) for name in given[0]}
    pools = {}
    for name, config, values in (
        ("one batch", SGD, [merged]), ("accumulated", replace(SGD, grad_accum=2), given)
    ):  # fmt: skip
        model = adapted(small("llama-nano"))
        assert kind(model, config).run(from_list(values), steps=1).tokens == sum(tokens)
        pools[name] = weights(model)
    for name in sites[0]:
        mean = (tokens[0] * sites[0][name] + tokens[1] * sites[1][name]) / sum(tokens)
        for pool in pools.values():
            torch.testing.assert_close(pool[name], mean, rtol=0, atol=1e-6)


@both
def test_a_step_without_labels_changes_nothing_and_counts_nothing(kind: Any) -> None:
    model = adapted(small())
    loop = kind(model, replace(CONFIG, prox_mu=1.0))
    source = labelled()
    loop.run(source, steps=2)  # moments and decay would move the weights now
    before, state = weights(model), loop.state_dict()
    empty = unlabelled(source())
    result = loop.run(lambda: empty, steps=3)
    assert (result.steps, result.tokens) == (3, 0)
    assert (result.loss_first, result.loss_last, result.loss_mean, result.grad_norm) == (0,) * 4
    assert equal(weights(model), before)
    after = loop.state_dict()
    assert all(torch.equal(after[key], state[key]) for key in state if "rng" not in key)

    # Between other steps it is passed over, and the means are of those.
    losses: list[float] = []
    full = [source(), source()]
    mixed = loop.run(
        from_list([empty, full[0], empty, full[1]]), steps=4,
        on_step=lambda done, loss: losses.append(float(loss)),
    )  # fmt: skip
    assert mixed.steps == 4
    assert mixed.tokens == sum(int((b["labels"][:, 1:] != -100).sum()) for b in full)
    assert losses[0] == losses[2] == 0.0
    assert (mixed.loss_first, mixed.loss_last) == (losses[1], losses[3])
    assert mixed.loss_mean == pytest.approx((losses[1] + losses[3]) / 2)


@both
def test_an_empty_batch_among_accumulated_ones_counts_nothing(kind: Any) -> None:
    one, two = adapted(small()), adapted(small())
    batch = labelled()()
    kind(one, SGD).run(lambda: batch, steps=1)
    result = kind(two, replace(SGD, grad_accum=2)).run(
        from_list([unlabelled(batch), batch]), steps=1
    )
    assert result.tokens == int((batch["labels"][:, 1:] != -100).sum())
    for name, tensor in weights(two).items():
        torch.testing.assert_close(tensor, weights(one)[name], rtol=0, atol=1e-7)


# -- rounds -------------------------------------------------------------------


@both
@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_a_round_gone_on_with_elsewhere_is_bit_equal(kind: Any, rate: float) -> None:
    config = replace(CONFIG, prox_mu=0.5, grad_accum=2)

    def fresh(seed: int) -> tuple[Any, Any]:
        model = adapted(with_dropout(rate), dropout=rate)
        torch.manual_seed(seed)
        return model, kind(model, config)

    whole, loop = fresh(1)
    loop.run(labelled(seed=8), steps=2, position=0)
    reference = loop.run(labelled(seed=9), steps=6, position=2, span=3)

    model, first = fresh(1)
    first.run(labelled(seed=8), steps=2, position=0)
    taken: dict[str, Any] = {}

    def take(step: int, _: Tensor) -> None:
        if step == 4:
            taken.update(state=first.state_dict(), weights=weights(model), far=first.so_far())
            raise InterruptedError

    with pytest.raises(InterruptedError):
        first.run(labelled(seed=9), steps=6, position=2, span=3, on_step=take)

    other, again = fresh(99)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(taken["weights"][name])
    again.load_state_dict(taken["state"])
    source = labelled(seed=9)
    for _ in range(4 * config.grad_accum):
        source()
    result = again.run(source, steps=6, position=2, span=3, carried=taken["far"])
    assert equal(weights(other), weights(whole))
    assert replace(result, seconds=0.0) == replace(reference, seconds=0.0)
    # Nothing is read ahead: the next round of both goes on alike.
    assert equal_state(again.state_dict(), loop.state_dict())
    assert not any(key.startswith("round_start/") for key in again.state_dict())


def equal_state(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@both
def test_batches_are_drawn_when_a_step_needs_them(kind: Any) -> None:
    drawn: list[int] = []
    source = labelled()

    def watched() -> dict[str, Tensor]:
        drawn.append(1)
        return source()

    seen: list[int] = []
    loop = kind(adapted(small()), replace(CONFIG, grad_accum=2))
    loop.run(watched, steps=3, on_step=lambda done, loss: seen.append(len(drawn)))
    assert seen == [2, 4, 6] and len(drawn) == 6


@both
def test_optimizer_state_is_carried_or_dropped_by_the_caller(kind: Any) -> None:
    def second_round(state: dict[str, Tensor] | None) -> dict[str, Tensor]:
        model = adapted(small())
        loop = kind(model, CONFIG)
        loop.run(labelled(), steps=2)
        if state is not None:
            loop.load_state_dict(state)
        loop.run(labelled(seed=3), steps=2, position=2)
        return weights(model)

    kept, dropped = second_round(None), second_round({})
    assert not equal(kept, dropped)
    assert equal(second_round({}), dropped)


@both
def test_the_trained_set_may_change_between_rounds(kind: Any) -> None:
    model = adapted(small())
    loop = kind(model, replace(CONFIG, weight_decay=0.5))
    source = labelled()
    sides: dict[str, dict[str, Tensor]] = {}

    def only(side: str) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(side in name)

    for position, side in enumerate(["lora_A", "lora_B", "lora_A"]):
        only(side)
        before, state = weights(model), loop.state_dict()
        loop.run(source, steps=2, position=2 * position)
        after, moved = weights(model), loop.state_dict()
        assert all(torch.equal(after[n], before[n]) == (side not in n) for n in before)
        assert all(
            torch.equal(moved[k], state[k]) for k in state if side not in k and "rng" not in k
        )
        sides[side] = moved
    assert {int(v) for k, v in sides["lora_A"].items() if k.startswith("step/")} == {2, 4}

    # A process that never trained A keeps its state all the same.
    other = adapted(small())
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(weights(model)[name])
    model, first, state = other, model, loop.state_dict()
    only("lora_B")
    resumed = kind(other, replace(CONFIG, weight_decay=0.5))
    resumed.load_state_dict(state)
    model = first
    only("lora_B")
    for each in (resumed, loop):
        each.run(labelled(seed=5), steps=2, position=6)
    assert equal(weights(other), weights(first))
    assert equal_state(resumed.state_dict(), loop.state_dict())


# -- the proximal term --------------------------------------------------------


@both
def test_the_proximal_term_is_the_gradient_of_its_formula(kind: Any) -> None:
    mu, batch = 0.7, labelled()()
    model, bare = adapted(small("llama-nano")), adapted(small("llama-nano"))
    kind(model, replace(SGD, lr=0.1, prox_mu=mu)).run(lambda: batch, steps=3)
    trained = {n: p for n, p in bare.named_parameters() if p.requires_grad}
    start = {name: p.detach().clone() for name, p in trained.items()}
    for _ in range(3):
        loss = bare(**batch, use_cache=False).loss
        loss = loss + mu / 2 * sum((p - start[n]).square().sum() for n, p in trained.items())
        loss.backward()
        with torch.no_grad():
            for parameter in trained.values():
                parameter -= 0.1 * parameter.grad
        bare.zero_grad()
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, weights(bare)[name], rtol=0, atol=1e-6)


def test_a_strong_pull_keeps_the_weights_near_where_each_round_began() -> None:
    def moved(mu: float) -> float:
        model = adapted(small())
        loop = InnerLoop(model, replace(SGD, lr=0.05, prox_mu=mu))
        loop.run(labelled(), steps=5)
        before = weights(model)
        loop.run(labelled(seed=1), steps=20)
        return sum(float((weights(model)[n] - before[n]).square().sum()) for n in before)

    assert moved(10.0) < 0.2 * moved(0.0)


def test_going_on_without_the_rounds_start_is_refused() -> None:
    loop = InnerLoop(small(), replace(CONFIG, prox_mu=0.1))
    with pytest.raises(TrainingError, match="prox-mu") as caught:
        loop.run(batches(), steps=5, start=2)
    assert "\n" not in str(caught.value)
    loop.run(batches(), steps=1)


# -- faults -------------------------------------------------------------------


@both
def test_a_loss_that_is_not_a_number_names_the_step(kind: Any) -> None:
    sane, sick = adapted(small()), adapted(small())
    kind(sane, CONFIG).run(labelled(), steps=2, position=0, span=2)
    calls: list[int] = []

    def poison(module: Any, arguments: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * math.nan if len(calls) == 3 else output

    sick.base_model.model.transformer.ln_f.register_forward_hook(poison)
    loop = kind(sick, CONFIG)
    with pytest.raises(TrainingError, match="not finite at local step 3") as caught:
        loop.run(labelled(), steps=9, position=0, span=9)
    assert "\n" not in str(caught.value)
    assert equal(weights(sick), weights(sane))
    assert all(p.grad is None for p in sick.parameters())
    assert loop.run(labelled(), steps=2).steps == 2
    assert not equal(weights(sick), weights(sane))


@both
def test_time_ends_a_round(kind: Any) -> None:
    loop = kind(adapted(small()), CONFIG)
    assert loop.run(labelled(), steps=None, seconds=0.0).steps == 1
    assert loop.run(labelled(), steps=2, seconds=1e6).steps == 2
