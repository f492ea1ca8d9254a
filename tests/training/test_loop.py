from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flower_geo.errors import TrainingError
from flower_geo.models import load_state, snapshot
from flower_geo.training import InnerConfig, InnerLoop, learning_rate
from flower_geo.training import loop as loop_module
from flower_geo.training import optimizer as optimizer_module
from flower_geo.training.optimizer import build_optimizer
from tests.training.conftest import batches, equal, small, weights, with_dropout

CONFIG = InnerConfig(lr=3e-3, warmup_steps=3, total_steps=20)


def plain_adamw(model: Any, steps: int, config: InnerConfig = CONFIG) -> None:
    """The same training as a bare script."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    source = batches()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(config, step)
        batch = source()
        # a cache would lay keys out in other memory, and round differently
        model(input_ids=batch, labels=batch, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


# -- identities ---------------------------------------------------------------


@pytest.mark.parametrize("spec", ["gpt2-nano", "llama-nano"])
def test_the_loop_is_plain_training_bit_equal(spec: str) -> None:
    ours, bare = small(spec), small(spec)
    InnerLoop(ours, CONFIG).run(batches(), steps=6, position=0, span=6)
    plain_adamw(bare, 6)
    assert equal(weights(ours), weights(bare))


def test_dropout_draws_what_a_bare_script_draws() -> None:
    ours, bare = with_dropout(), with_dropout()
    torch.manual_seed(11)
    loop = InnerLoop(ours, CONFIG)
    torch.rand(100)  # the caller's draws do not disturb the loop's stream
    loop.run(batches(), steps=4)
    torch.manual_seed(11)
    plain_adamw(bare, 4)
    assert equal(weights(ours), weights(bare))


@pytest.mark.parametrize("rate", [0.0, 0.3])
def test_ten_steps_are_five_saved_loaded_and_five(rate: float) -> None:
    straight = with_dropout(rate)
    torch.manual_seed(1)
    InnerLoop(straight, CONFIG).run(batches(), steps=10)

    first = with_dropout(rate)
    torch.manual_seed(1)
    loop = InnerLoop(first, CONFIG)
    source = batches()
    loop.run(source, steps=5, position=0, span=5)
    saved, state = snapshot(first), loop.state_dict()

    second = with_dropout(rate)
    load_state(second, saved)
    torch.manual_seed(999)
    resumed = InnerLoop(second, CONFIG)
    resumed.load_state_dict(state)
    resumed.run(source, steps=5, position=5, span=5)
    assert equal(weights(second), weights(straight))


def test_rounds_of_one_loop_are_one_run() -> None:
    straight, rounds = with_dropout(), with_dropout()
    torch.manual_seed(2)
    InnerLoop(straight, CONFIG).run(batches(), steps=8)
    torch.manual_seed(2)
    loop, source = InnerLoop(rounds, CONFIG), batches()
    for position in (0, 2, 4, 6):
        loop.run(source, steps=2, position=position, span=2)
        torch.manual_seed(position)  # anything may happen between rounds
        rounds.eval()
    assert equal(weights(rounds), weights(straight))


def test_state_taken_inside_a_round_goes_on_there() -> None:
    straight = with_dropout()
    torch.manual_seed(3)
    InnerLoop(straight, CONFIG).run(batches(), steps=7, position=2, span=5)

    model = with_dropout()
    torch.manual_seed(3)
    loop, source = InnerLoop(model, CONFIG), batches()
    kept: dict[str, Any] = {}

    def stop(done: int, loss: Tensor) -> None:
        if done == 3:
            kept.update(weights=snapshot(model), state=loop.state_dict())
            raise InterruptedError

    with pytest.raises(InterruptedError):
        loop.run(source, steps=7, position=2, span=5, on_step=stop)
    other = with_dropout()
    load_state(other, kept["weights"])
    resumed = InnerLoop(other, CONFIG)
    resumed.load_state_dict(kept["state"])
    result = resumed.run(source, steps=7, position=2, span=5, start=3)
    assert result.steps == 4
    assert equal(weights(other), weights(straight))


def test_sgd_is_plain_descent() -> None:
    model, bare = small(), small()
    config = InnerConfig(
        lr=0.1, optimizer="sgd", clip_norm=0.0, weight_decay=0.0, schedule="constant"
    )
    InnerLoop(model, config).run(batches(), steps=1)
    batch = batches()()
    bare(input_ids=batch, labels=batch).loss.backward()
    with torch.no_grad():
        for parameter in bare.parameters():
            parameter -= 0.1 * parameter.grad
    for name, tensor in weights(model).items():
        torch.testing.assert_close(tensor, weights(bare)[name], rtol=0, atol=1e-8)


# -- one schedule -------------------------------------------------------------


def rates(monkeypatch: pytest.MonkeyPatch, runs: list[dict[str, Any]]) -> list[list[float]]:
    """Learning rates of each run of one site."""
    seen: list[float] = []
    real = learning_rate

    def watched(config: InnerConfig, position: float) -> float:
        seen.append(real(config, position))
        return seen[-1]

    monkeypatch.setattr(loop_module, "learning_rate", watched)
    loop = InnerLoop(with_dropout(), CONFIG)
    result = []
    for values in runs:
        seen.clear()
        loop.run(batches(), **values)
        result.append(list(seen))
    return result


def test_a_site_that_was_away_has_the_rate_of_one_that_never_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    always = rates(monkeypatch, [{"steps": 4, "position": p, "span": 4} for p in (0, 4, 8)])
    (late,) = rates(monkeypatch, [{"steps": 4, "position": 8, "span": 4}])
    assert late == always[2]
    whole = [learning_rate(CONFIG, position) for position in range(12)]
    assert [*always[0], *always[1], *always[2]] == whole


def test_sites_with_other_step_counts_walk_the_same_course(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (slow,) = rates(monkeypatch, [{"steps": 2, "position": 8, "span": 6}])
    (fast,) = rates(monkeypatch, [{"steps": 12, "position": 8, "span": 6}])
    (usual,) = rates(monkeypatch, [{"steps": 6, "position": 8, "span": 6}])
    assert fast[::2] == usual
    assert slow == usual[::3]


def test_time_moves_the_schedule_when_it_ends_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("flower_geo.training.loop.time.perf_counter", lambda: float(next(clock)))
    seen: list[float] = []

    def watched(config: InnerConfig, position: float) -> float:
        seen.append(position)
        return 0.0

    monkeypatch.setattr(loop_module, "learning_rate", watched)
    # The clock is read once before, and twice a step: elapsed is 1, 3, 5, ... when a step begins.
    result = InnerLoop(with_dropout(), CONFIG).run(
        batches(), steps=None, seconds=10.0, position=8, span=5
    )
    assert result.steps == 5
    assert seen == [8.5, 9.5, 10.5, 11.5, 12.5]


def test_time_ends_a_round_after_at_least_one_step() -> None:
    loop = InnerLoop(with_dropout(), CONFIG)
    assert loop.run(batches(), steps=1000, seconds=0.0).steps == 1
    assert loop.run(batches(), steps=3, seconds=1e6).steps == 3


def test_endless_and_finished_rounds_are_refused() -> None:
    loop = InnerLoop(with_dropout(), CONFIG)
    with pytest.raises(TrainingError, match="give steps or seconds"):
        loop.run(batches(), steps=None)
    with pytest.raises(TrainingError, match="no step is left"):
        loop.run(batches(), steps=3, start=3)


# -- accumulation, counting ---------------------------------------------------


def test_accumulated_batches_are_one_large_batch() -> None:
    large, parts = small(), small()
    source = batches(rows=3)
    rows = torch.cat([source(), source()])
    config = InnerConfig(lr=0.1, optimizer="sgd", clip_norm=0.0, schedule="constant")
    one = InnerLoop(large, config).run(lambda: rows, steps=1)
    # unequal parts: each counts by its tokens
    stream = iter([rows[:1], rows[1:]])
    two = InnerLoop(parts, InnerConfig(
        lr=0.1, optimizer="sgd", clip_norm=0.0, schedule="constant", grad_accum=2
    )).run(lambda: next(stream), steps=1)  # fmt: skip
    assert one.tokens == two.tokens == 6 * 7
    assert one.loss_first == pytest.approx(two.loss_first, rel=1e-6)
    for name, tensor in weights(large).items():
        torch.testing.assert_close(tensor, weights(parts)[name], rtol=0, atol=1e-7)


def test_result_counts_and_averages() -> None:
    losses: list[float] = []
    loop = InnerLoop(small(), CONFIG)
    result = loop.run(
        batches(rows=2, length=8), steps=5, on_step=lambda done, loss: losses.append(float(loss))
    )
    assert (result.steps, result.tokens) == (5, 5 * 2 * 7)
    assert result.loss_first == losses[0] == pytest.approx(math.log(64), abs=0.2)
    assert result.loss_last == losses[-1]
    assert result.loss_mean == pytest.approx(sum(losses) / 5)
    assert result.seconds > 0 and result.grad_norm > 0


def test_training_lowers_the_loss() -> None:
    batch = batches()()
    result = InnerLoop(small(), InnerConfig(lr=3e-3, schedule="constant", total_steps=20)).run(
        lambda: batch, steps=20
    )
    assert result.loss_last < result.loss_first - 1.0


def test_clipping_bounds_the_step() -> None:
    def moved(clip: float) -> float:
        model = small()
        before = weights(model)
        InnerLoop(model, InnerConfig(
            lr=1.0, optimizer="sgd", clip_norm=clip, weight_decay=0.0, schedule="constant"
        )).run(batches(), steps=1)  # fmt: skip
        after = weights(model)
        return math.sqrt(sum(float((after[n] - before[n]).square().sum()) for n in before))

    assert moved(0.01) == pytest.approx(0.01, rel=1e-3)
    free = moved(0.0)
    assert free > 0.02
    assert free == pytest.approx(moved(1e9), rel=1e-4)


def test_the_callers_world_stays_as_it_was() -> None:
    model = with_dropout().eval()
    loop = InnerLoop(model, CONFIG)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    loop.run(batches(), steps=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_frozen_parameters_stay() -> None:
    model = small()
    model.transformer.wpe.weight.requires_grad_(False)
    before = weights(model)
    InnerLoop(model, CONFIG).run(batches(), steps=2)
    after = weights(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(before) - {"transformer.wpe.weight"}
    model.requires_grad_(False)
    with pytest.raises(TrainingError, match="no trainable parameter"):
        InnerLoop(model, CONFIG)


def test_bf16_keeps_weights_and_moments_in_fp32() -> None:
    model = small()
    loop = InnerLoop(model, InnerConfig(lr=1e-3, precision="bf16"))
    rough = loop.run(batches(), steps=2)
    exact = InnerLoop(small(), InnerConfig(lr=1e-3, precision="fp32")).run(batches(), steps=2)
    assert rough.loss_last != exact.loss_last
    assert rough.loss_last == pytest.approx(exact.loss_last, rel=2e-2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    moments = {v.dtype for k, v in loop.state_dict().items() if k.startswith("exp_avg")}
    assert moments == {torch.float32}


# -- faults -------------------------------------------------------------------


class Poisoned(nn.Module):
    """Wraps a model; from one call on, the loss or only its gradient is not finite."""

    def __init__(self, inner: nn.Module, call: int, how: str) -> None:
        super().__init__()
        self.inner, self.call, self.how, self.calls = inner, call, how, 0

    def forward(self, **values: Any) -> Any:
        output = self.inner(**values)
        if self.calls == self.call:
            if self.how == "loss":
                output.loss = output.loss * math.nan
            else:
                # finite value, infinite slope
                zero = (next(self.inner.parameters()) * 0.0).sum()
                output.loss = output.loss + zero.abs().sqrt()
        self.calls += 1
        return output


@pytest.mark.parametrize("how", ["loss", "gradient"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("deferred", [False, True])
def test_a_step_that_is_not_finite_is_not_taken(
    how: str, optimizer: Any, deferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = InnerConfig(lr=1e-3, optimizer=optimizer, total_steps=20)
    if deferred:
        # As on a GPU: the optimizer skips the step, the host hears of it later.
        as_there: Any = lambda p, c, fused: build_optimizer(p, c, fused=True)  # noqa: E731
        monkeypatch.setattr(optimizer_module, "build_optimizer", as_there)

    def looped(model: nn.Module) -> InnerLoop:
        loop = InnerLoop(model, config)
        loop._deferred = deferred
        return loop

    sane = small()
    good = looped(sane)
    good.run(batches(), steps=3)
    sick = small()
    loop = looped(Poisoned(sick, 3, how))
    with pytest.raises(TrainingError, match="not finite at local step 4") as caught:
        loop.run(batches(), steps=9)
    assert "\n" not in str(caught.value) and "inner-lr" in str(caught.value)
    assert equal(weights(sick), weights(sane))
    wanted, found = good.state_dict(), loop.state_dict()
    for key, value in wanted.items():
        if not key.startswith("rng/"):
            what, _, name = key.partition("/")
            assert torch.equal(found[f"{what}/inner.{name}"], value)
    assert all(p.grad is None for p in sick.parameters())
    # The batch that did it is gone; the loop goes on.
    assert loop.run(batches(), steps=2).steps == 2
    assert not equal(weights(sick), weights(sane))


def test_a_source_that_fails_leaves_the_loop_whole() -> None:
    model = small()
    loop = InnerLoop(model, CONFIG)
    source = batches()
    calls = iter(range(3))

    def failing() -> Tensor:
        if next(calls, None) is None:
            raise OSError("disk gone")
        return source()

    with pytest.raises(OSError, match="disk gone"):
        loop.run(failing, steps=5)
    reference = small()
    InnerLoop(reference, CONFIG).run(batches(), steps=5 - 2, span=3)
    assert equal(weights(model), weights(reference))


@pytest.mark.gpu
def test_a_gpu_trains_and_resumes_bit_equal() -> None:
    def trained(parts: tuple[int, ...]) -> dict[str, Tensor]:
        model = with_dropout().cuda()
        torch.manual_seed(4)
        state: dict[str, Tensor] = {}
        source, position = batches(), 0
        for steps in parts:
            loop = InnerLoop(model, CONFIG)
            loop.load_state_dict(state)
            loop.run(source, steps=steps, position=position)
            state, position = loop.state_dict(), position + steps
        return weights(model)

    assert equal(trained((10,)), trained((5, 5)))
