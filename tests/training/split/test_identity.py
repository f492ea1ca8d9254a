"""One site and the cloud train as the unsplit model does, to the bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.models import adapter_state, snapshot
from flower_geo.models.split import merge_states
from flower_geo.training import InnerConfig, InnerLoop, InnerResult
from flower_geo.training.split import MODES, Mode
from tests.models.split_models import PADDINGS
from tests.training.split.halves import CONFIG, Pair, adapted, batch_stream, pair

FULL = pytest.mark.parametrize("mode", ["vanilla", "u-shape"])
STEPS = 4


def whole_run(
    config: InnerConfig, source: Any, **options: Any
) -> tuple[dict[str, Tensor], list[float], InnerResult]:
    model = adapted(**options)
    losses: list[float] = []
    torch.manual_seed(5)
    result = InnerLoop(model, config).run(
        source, STEPS, position=0, span=20, on_step=lambda _, loss: losses.append(float(loss))
    )
    return snapshot(model), losses, result


def split_run(both: Pair, source: Any) -> tuple[dict[str, Tensor], list[float], InnerResult]:
    losses: list[float] = []
    result = both.loop.run(
        source, STEPS, position=0, span=20, on_step=lambda _, loss: losses.append(float(loss))
    )
    return both.weights(), losses, result


def assert_same(mode: Mode, config: InnerConfig, padding: str, **options: Any) -> None:
    weights, losses, result = whole_run(config, batch_stream(padding), **options)
    both = pair(mode, config, steps=STEPS, **options)
    own, own_losses, own_result = split_run(both, batch_stream(padding))
    assert own_losses == losses and len(set(losses)) == STEPS
    assert replace(own_result, seconds=0.0) == replace(result, seconds=0.0)
    merged = merge_states(own, names=weights)
    start = snapshot(adapted(**options))
    for name, tensor in weights.items():
        assert torch.equal(merged[name], tensor), name
        assert not torch.equal(start[name], tensor), name


@FULL
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_one_site_is_the_unsplit_loop(
    family: str, attention: str, tied: bool, padding: str, mode: Mode
) -> None:
    assert_same(mode, CONFIG, padding, family=family, attention=attention, tied=tied)


@FULL
@pytest.mark.parametrize("in_flight", [1, 4])
def test_micro_batches_are_accumulated_batches_to_the_bit(mode: Mode, in_flight: int) -> None:
    config = replace(CONFIG, grad_accum=3)
    weights, losses, result = whole_run(config, batch_stream())
    both = pair(mode, config, steps=STEPS, in_flight=in_flight)
    own, own_losses, own_result = split_run(both, batch_stream())
    assert own_losses == losses
    assert own_result.grad_norm == result.grad_norm
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())


@FULL
@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, optimizer="sgd", clip_norm=0.0, weight_decay=0.0),
        replace(CONFIG, clip_norm=1e-3),
        replace(CONFIG, precision="bf16"),
    ],
    ids=["sgd-unclipped", "clipped", "bf16"],
)
def test_other_settings_too(mode: Mode, config: InnerConfig) -> None:
    assert_same(mode, config, "left", family="llama")


@FULL
def test_micro_batches_are_the_full_batch(mode: Mode) -> None:
    batches = [batch_stream(seed=seed)() for seed in range(4)]
    full = {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}
    config = InnerConfig(lr=0.1, optimizer="sgd", clip_norm=0.5, schedule="constant")
    one = pair(mode, config, steps=1)
    once = one.loop.run(lambda: full, 1)
    parts = pair(mode, replace(config, grad_accum=4), steps=1)
    stream = iter(batches)
    result = parts.loop.run(lambda: next(stream), 1)
    assert result.tokens == once.tokens
    assert result.loss_mean == pytest.approx(once.loss_mean, rel=1e-6)
    for name, tensor in one.weights().items():
        torch.testing.assert_close(parts.weights()[name], tensor, rtol=0, atol=2e-7)


@FULL
def test_a_batch_without_labels_is_passed_over_on_both_sides(mode: Mode) -> None:
    def source() -> Any:
        stream = batch_stream()
        turn = iter(range(100))

        def following() -> dict[str, Tensor]:
            batch = stream()
            if next(turn) in (1, 4, 5):  # one of a step's two batches, then both
                return batch | {"labels": torch.full_like(batch["labels"], -100)}
            return batch

        return following

    config = replace(CONFIG, grad_accum=2)
    weights, losses, result = whole_run(config, source())
    both = pair(mode, config, steps=STEPS)
    own, own_losses, own_result = split_run(both, source())
    assert own_losses == losses and losses[2] == 0.0
    assert replace(own_result, seconds=0.0) == replace(result, seconds=0.0)
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())
    assert both.engine.steps_done == {"a": STEPS}
    assert [call.step for call in both.channel.calls if call.kind == "step"] == [1, 2, 3, 4]
    assert all(call.step != 3 for call in both.channel.calls if call.kind == "forward")


@FULL
@pytest.mark.parametrize("packed", [False, True], ids=["positions", "packed"])
def test_positions_go_along(mode: Mode, packed: bool) -> None:
    def source() -> Any:
        stream = batch_stream("none")

        def following() -> dict[str, Tensor]:
            batch = stream()
            batch.pop("attention_mask")
            row = [0, 1, 2, 3, 0, 1, 2, 3] if packed else [3, 4, 5, 6, 7, 8, 9, 10]
            return batch | {"position_ids": torch.tensor([row] * 3)}

        return following

    weights, losses, _ = whole_run(CONFIG, source(), family="llama")
    plain = whole_run(CONFIG, batch_stream("none"), family="llama")[1]
    own, own_losses, _ = split_run(pair(mode, steps=STEPS, family="llama"), source())
    assert own_losses == losses
    assert (losses != plain) or not packed
    assert all(torch.equal(own[name], tensor) for name, tensor in weights.items())


@FULL
def test_plain_token_rows_are_batches_too(mode: Mode) -> None:
    def rows() -> Any:
        stream = batch_stream("none")
        return lambda: stream()["input_ids"]

    weights, losses, result = whole_run(CONFIG, rows())
    own, own_losses, own_result = split_run(pair(mode, steps=STEPS), rows())
    assert own_result.tokens == result.tokens
    assert own_losses == pytest.approx(losses, rel=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=5e-4)


def test_the_cloud_sees_no_label_in_a_u_shape_and_no_token_in_any_mode() -> None:
    wanted: dict[Mode, set[str]] = {
        "vanilla": {"activation", "labels", "mask"}, "u-shape": {"activation", "mask"},
    }  # fmt: skip
    for mode, names in wanted.items():
        both = pair(mode, steps=2)
        both.loop.run(batch_stream("left"), 2)
        forwards = [call for call in both.channel.calls if call.kind == "forward"]
        assert set().union(*(call.blobs for call in forwards)) == names


def test_blobs_are_counted() -> None:
    both = pair("u-shape", steps=2)
    both.loop.run(batch_stream(), 2)
    for traffic in (both.loop.traffic, both.engine.traffic("a")):
        calls, answers = both.channel.calls, both.channel.answers
        assert traffic.calls == len(calls) == len(answers) == 2 * 3 + 1
        assert traffic.up == sum(len(blob) for call in calls for blob in call.blobs.values()) > 0
        assert traffic.down == sum(len(b) for answer in answers for b in answer.blobs.values()) > 0


def test_both_halves_adapters_are_the_whole_ones() -> None:
    for mode in MODES:
        both = pair(mode, steps=2)
        both.loop.run(batch_stream(), 2)
        parts = [both.engine.average()]
        parts += [adapter_state(part.model) for part in both.loop.half.parts.values()]  # type: ignore[arg-type]
        whole = adapter_state(adapted())
        merged = merge_states(*parts, names=whole)
        assert {n: t.shape for n, t in merged.items()} == {n: t.shape for n, t in whole.items()}
        assert all(not torch.equal(merged[name], tensor) for name, tensor in whole.items())


@pytest.mark.gpu
@FULL
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_on_a_gpu_too(family: str, precision: Any, mode: Mode) -> None:
    config = replace(CONFIG, precision=precision, grad_accum=2)
    assert_same(mode, config, "left", family=family, device="cuda")
