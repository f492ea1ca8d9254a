"""Several sites on one cloud."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.calls import Call
from flower_geo.errors import CallFailed
from flower_geo.models import snapshot
from flower_geo.training import InnerConfig, InnerLoop, learning_rate
from flower_geo.training.optimizer import build_optimizer
from flower_geo.training.split import MODES, CloudEngine, Mode, SplitLoop
from tests.training.split.halves import (
    CONFIG,
    EXACT,
    Direct,
    adapted,
    batch_stream,
    pair,
    parts_of,
    run_sites,
)

SGD = InnerConfig(lr=0.1, optimizer="sgd", clip_norm=0.0, weight_decay=0.0, schedule="constant")
SITES = ("a", "b", "c")


class Sites:
    """Sites with models of their own on one engine."""

    def __init__(
        self,
        mode: Mode,
        config: InnerConfig,
        steps: int | None,
        sites: tuple[str, ...] = SITES,
        **options: Any,
    ) -> None:
        _, middle = parts_of(adapted(**options), mode)
        self.engine = CloudEngine(middle, config, EXACT, mode, seed=3)
        self.engine.begin(1, sites[::-1], 0, 20, steps)
        self.channels = {site: Direct(self.engine, site) for site in sites}
        self.loops: dict[str, SplitLoop] = {}
        for number, site in enumerate(sites):
            torch.manual_seed(number)
            parts, _ = parts_of(adapted(**options), mode)
            self.loops[site] = SplitLoop(parts, self.channels[site], config, EXACT, mode)

    def run(self, sources: Any, **values: Any) -> Any:
        loops = {site: (loop, sources[site]) for site, loop in self.loops.items()}
        return run_sites(self.engine, loops, list(self.channels.values()), **values)


def batches_of_sites() -> dict[str, dict[str, Tensor]]:
    """One batch a site, with unequal numbers of labels."""
    return {site: batch_stream(seed=number, rows=number + 1)() for number, site in enumerate(SITES)}


def centralised(batches: dict[str, dict[str, Tensor]]) -> tuple[dict[str, Tensor], float]:
    model = adapted()
    full = {key: torch.cat([batch[key] for batch in batches.values()]) for key in batches["a"]}
    result = InnerLoop(model, SGD).run(lambda: full, 1)
    return snapshot(model), result.loss_mean


@pytest.mark.parametrize("mode", ["vanilla", "u-shape", "sfl-v1"])
def test_a_step_of_three_sites_is_one_on_all_their_batches(mode: Mode) -> None:
    batches = batches_of_sites()
    wanted, loss = centralised(batches)
    sites = Sites(mode, SGD, 1)
    results = sites.run({site: lambda site=site: batches[site] for site in SITES}, steps=1)
    tokens = {site: result.tokens for site, result in results.items()}
    total = sum(tokens.values())
    assert len(set(tokens.values())) == 3
    mean = sum(result.loss_mean * tokens[site] for site, result in results.items()) / total
    assert mean == pytest.approx(loss, rel=1e-5)
    halves = {site: snapshot(loop.half) for site, loop in sites.loops.items()}
    sites.engine.average()
    found = snapshot(sites.engine.part)
    for name in halves["a"]:
        found[name] = sum(halves[site][name] * (tokens[site] / total) for site in SITES)
    assert found.keys() == wanted.keys()
    start = snapshot(adapted())
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=5e-7)
        assert float((start[name] - tensor).abs().max()) > 1e-5


def test_taking_turns_is_sequential_training() -> None:
    config = replace(CONFIG, clip_norm=0.0)
    sites = Sites("sfl-v2", config, 3)
    results = sites.run({site: batch_stream(seed=n) for n, site in enumerate(SITES)}, steps=3,
                        position=0, span=20)  # fmt: skip

    bottoms = {site: parts_of(adapted(), "sfl-v2")[0]["bottom"] for site in SITES}
    _, middle = parts_of(adapted(), "sfl-v2")
    parts = {**bottoms, "cloud": middle}
    optimizers = {
        name: build_optimizer(
            {n: p for n, p in part.named_parameters() if p.requires_grad}, config, fused=False
        )
        for name, part in parts.items()
    }
    sources = {site: batch_stream(seed=n) for n, site in enumerate(SITES)}
    losses: dict[str, list[float]] = {site: [] for site in SITES}
    for step in range(3):
        for site in SITES:
            batch = sources[site]()
            hidden = bottoms[site].run(batch["input_ids"])
            logits = middle.run(hidden)
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
            )
            torch.autograd.backward(loss)
            losses[site].append(float(loss.detach()))
            for name in (site, "cloud"):
                for group in optimizers[name].param_groups:
                    group["lr"] = learning_rate(config, 20 * step / 3)
                optimizers[name].step()
                optimizers[name].zero_grad()
    for site in SITES:
        assert results[site].loss_mean == pytest.approx(sum(losses[site]) / 3, rel=1e-5)
        for name, tensor in snapshot(bottoms[site]).items():
            torch.testing.assert_close(
                snapshot(sites.loops[site].half)[name], tensor, rtol=0, atol=2e-5
            )
    for name, tensor in snapshot(middle).items():
        torch.testing.assert_close(snapshot(sites.engine.part)[name], tensor, rtol=0, atol=2e-5)


@pytest.mark.parametrize("mode", MODES)
def test_sites_that_run_at_once_give_the_same_bits_each_time(mode: Mode) -> None:
    config = replace(CONFIG, grad_accum=2)
    ends = []
    for _ in range(2):
        sites = Sites(mode, config, 3, dropout=0.2)
        sites.run({s: batch_stream(seed=n) for n, s in enumerate(SITES)}, steps=3)
        sites.engine.average()
        ends.append([snapshot(sites.engine.part)] +
                    [snapshot(loop.half) for loop in sites.loops.values()])  # fmt: skip
    for one, other in zip(*ends, strict=True):
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    assert not all(torch.equal(t, ends[0][2][n]) for n, t in ends[0][1].items())


def test_one_site_alone_is_the_mean_of_one() -> None:
    """The cloud half of its own gives the bits of the shared one."""
    ends = []
    for mode in ("vanilla", "sfl-v1", "sfl-v2"):
        both = pair(mode, steps=3)
        both.loop.run(batch_stream(), 3)
        both.engine.average()
        ends.append(both.weights())
    for other in ends[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in ends[0].items())


@pytest.mark.parametrize("mode", ["vanilla", "u-shape", "sfl-v2", "cse", "sage"])
def test_a_site_that_leaves_frees_the_others(mode: Mode) -> None:
    sites = Sites(mode, CONFIG, 3, ("a", "b"))
    source, calls = batch_stream(), iter(range(100))

    def failing() -> Any:
        if next(calls) == 1:
            raise OSError("disk gone")
        return source()

    with pytest.raises(OSError, match="disk gone"):
        sites.run({"a": failing, "b": batch_stream(seed=1)}, steps=3)
    assert sites.engine.steps_done == {"b": 3}
    assert sites.engine.sites == ("b",)
    answers: list[Any] = []
    sites.engine.submit("a", Call("finish", 0), answers.append)
    assert isinstance(answers[0], CallFailed) and "no longer" in str(answers[0])


def test_a_site_without_labels_waits_and_moves_nothing_but_its_own_half_stays() -> None:
    batches = batches_of_sites()
    empty = batches["b"] | {"labels": torch.full_like(batches["b"]["labels"], -100)}
    sites = Sites("vanilla", CONFIG, 1, ("a", "b"))
    before = snapshot(sites.loops["b"].half)
    results = sites.run({"a": lambda: batches["a"], "b": lambda: empty}, steps=1)
    assert (results["b"].tokens, results["b"].steps) == (0, 1)
    after = snapshot(sites.loops["b"].half)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    alone = pair("vanilla", steps=1)
    alone.loop.run(lambda: batches["a"], 1)
    ours = snapshot(sites.engine.part)
    assert all(torch.equal(ours[n], t) for n, t in alone.engine_weights().items())


def test_sites_scale_their_gradients_by_one_norm() -> None:
    clipped = replace(SGD, clip_norm=1e-2)
    batches = batches_of_sites()
    sources = {site: lambda site=site: batches[site] for site in SITES}
    small, free = Sites("vanilla", clipped, 1), Sites("vanilla", SGD, 1)
    results = small.run(sources, steps=1)
    free.run(sources, steps=1)
    norms = {result.grad_norm for result in results.values()}
    assert len(norms) == 1
    factor = 1e-2 / norms.pop()
    start = snapshot(adapted())
    for site in SITES:
        for one, other in (
            (small.loops[site].half, free.loops[site].half),
            (small.engine.part, free.engine.part),
        ):
            for name, tensor in snapshot(one).items():
                moved = snapshot(other)[name] - start[name]
                torch.testing.assert_close(
                    tensor - start[name], moved * factor, rtol=1e-3, atol=1e-6
                )


@pytest.mark.parametrize("mode", MODES)
def test_in_flight_changes_no_bit_with_dropout(mode: Mode) -> None:
    ends, losses = [], []
    for in_flight in (1, 4, 4):
        both = pair(mode, replace(CONFIG, grad_accum=5), dropout=0.3, in_flight=in_flight, steps=3)
        losses.append(both.loop.run(batch_stream(), 3).loss_mean)
        ends.append(both.weights())
    assert len(set(losses)) == 1
    for other in ends[1:]:
        assert all(torch.equal(tensor, other[name]) for name, tensor in ends[0].items())
    plain = pair(mode, replace(CONFIG, grad_accum=5), steps=3)
    assert plain.loop.run(batch_stream(), 3).loss_mean != losses[0]


def test_sites_with_halves_of_their_own_meet_now_and_then() -> None:
    _, middle = parts_of(adapted(), "sfl-v1")
    engine = CloudEngine(middle, CONFIG, EXACT, "sfl-v1", meet_every=2)
    engine.begin(1, ["a", "b"], 0, 20, 4)
    forward = first_forward()
    answers: list[Any] = []

    def step(site: str, number: int) -> None:
        meta = {"tokens": forward.meta["tokens"], "micros": 1, "position": 0.0, "norms": {}}
        engine.submit(site, replace(forward, step=number), answers.append)
        engine.submit(site, Call("step", number, 0, meta), answers.append)
        while engine.work(0.0):
            pass

    for number in (1, 2, 3):
        step("a", number)
    assert engine.steps_done == {"a": 2, "b": 0} and engine.boundary is None
    step("b", 1)
    assert engine.steps_done == {"a": 2, "b": 1}
    engine.submit("b", replace(forward, step=2), answers.append)
    tokens = forward.meta["tokens"]
    engine.submit(
        "b", Call("step", 2, 0, {"tokens": tokens, "micros": 1, "position": 0.0}), answers.append
    )
    assert engine.work(0.0) and engine.work(0.0)
    assert engine.boundary == 2  # a waits, and has not begun its third
    tensors, meta = engine.state_dict()
    while engine.work(0.0):
        pass
    assert engine.steps_done == {"a": 3, "b": 2}
    engine.load_state_dict(tensors, meta)
    assert engine.steps_done == {"a": 2, "b": 2} and engine.boundary == 2
    assert all(not isinstance(answer, Exception) for answer in answers)


def first_forward() -> Call:
    both = pair("vanilla")
    both.loop.run(batch_stream(), 1)
    return both.channel.calls[0]


def test_calls_that_wait_fail_when_the_round_goes_back_or_anew() -> None:
    sites = Sites("vanilla", CONFIG, 3, ("a", "b"))
    state = sites.engine.state_dict()
    answers: list[Any] = []
    step = Call("step", 1, 0, {"tokens": 0, "micros": 0, "position": 0.0})
    sites.engine.submit("a", step, answers.append)
    assert not sites.engine.work(0.0)  # b has not called
    sites.engine.load_state_dict(*state)
    sites.engine.submit("a", step, answers.append)
    sites.engine.begin(2, ["a"], 0, 20, 3)
    assert [(type(a), a.retry) for a in answers] == [(CallFailed, True)] * 2
    sites.engine.submit("a", step, answers.append)
    assert sites.engine.work(0.0) and answers[2].meta["norm"] == 0.0


def test_a_round_by_time_ends_site_by_site() -> None:
    sites = Sites("vanilla", CONFIG, None, ("a", "b"))
    halts = {"a": 2, "b": 4}
    results = {}
    loops = {
        site: (loop, batch_stream(seed=number))
        for number, (site, loop) in enumerate(sites.loops.items())
    }
    # Each site knows how long its own round is; the cloud does not.
    for loop, _ in loops.values():
        run = loop.run
        steps = halts["a" if loop is sites.loops["a"] else "b"]
        loop.run = partial(run, steps=steps)  # type: ignore[method-assign]
    results = run_sites(sites.engine, loops, list(sites.channels.values()))
    assert {site: result.steps for site, result in results.items()} == halts
    assert sites.engine.steps_done == halts
