"""Calls that are refused, gradients that are not finite: the engine stays usable."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.calls import Answer, Call
from flower_geo.compression import codec
from flower_geo.errors import CallFailed, ConfigError, SplitError, TrainingError
from flower_geo.models import snapshot
from flower_geo.models.split import split_parts
from flower_geo.training.split import CloudEngine, Mode, SplitLoop
from tests.models.split_models import small_model
from tests.training.split.halves import (
    CONFIG,
    EXACT,
    Direct,
    Pair,
    adapted,
    batch_stream,
    cut_for,
    pair,
    parts_of,
)

STEPS = 3


@cache
def clean(mode: Mode) -> dict[str, Tensor]:
    both = pair(mode, steps=STEPS)
    both.loop.run(batch_stream("left"), STEPS)
    return both.weights()


@cache
def first_call(mode: Mode) -> Call:
    """The forward that a site begins with."""
    both = pair(mode, steps=STEPS)
    both.loop.run(batch_stream("left"), 1)
    return both.channel.calls[0]


def asked(engine: CloudEngine, call: Call, site: str = "a") -> Answer | Exception:
    """One call and its answer."""
    answers: list[Answer | Exception] = []
    engine.submit(site, call, answers.append)
    while not answers:
        assert engine.work(0.0)
    return answers[0]


def fp32(tensor: Tensor) -> bytes:
    return codec("fp32").encode(tensor.float())


def with_meta(**values: Any) -> Callable[[Call], Call]:
    return lambda call: replace(call, meta={**call.meta, **values})


def with_blob(name: str, blob: bytes | None) -> Callable[[Call], Call]:
    def changed(call: Call) -> Call:
        blobs = {key: value for key, value in call.blobs.items() if key != name}
        return replace(call, blobs=blobs if blob is None else blobs | {name: blob})

    return changed


ZEROS = codec("fp32").encode(torch.zeros(64, 64, 16))
FAULTS: dict[str, tuple[Callable[[Call], Call], str]] = {
    "step": (lambda call: replace(call, step=2), "step 1 comes next"),
    "step-zero": (lambda call: replace(call, step=0), "step 1 comes next"),
    "micro": (lambda call: replace(call, micro=3), "micro-batch 3, and 0 comes next"),
    "backward-first": (lambda call: replace(call, kind="backward"), "backward"),
    "step-first": (lambda call: replace(call, kind="step"), "no whole number|closes a step"),
    "tokens": (with_meta(tokens=7.5), "tokens is no whole number"),
    "tokens-none": (with_meta(tokens=0), "no part of a step"),
    "total": (with_meta(total=1), "no part of a step"),
    "dtype": (with_meta(dtype="int8"), "dtype"),
    "delta": (with_meta(delta=[0]), "delta coded"),
    "samples": (with_meta(samples=["a"]), "samples"),
    "width": (with_blob("activation", fp32(torch.ones(3, 8, 15))), "shape"),
    "flat": (with_blob("activation", fp32(torch.ones(24, 16))), "shape"),
    "empty": (with_blob("activation", fp32(torch.ones(0, 8, 16))), "shape"),
    "long": (with_blob("activation", fp32(torch.ones(2, 33, 16))), "rows have 33 tokens"),
    "no-activation": (with_blob("activation", None), "has no activation"),
    "huge": (with_blob("activation", ZEROS), "at most 512 tokens"),
    "mask": (with_blob("mask", fp32(torch.ones(3, 7))), "mask has shape"),
    "mask-values": (with_blob("mask", fp32(torch.full((3, 8), 0.5))), "mask holds"),
    "positions": (with_blob("positions", fp32(torch.full((3, 8), -1.0))), "positions holds"),
    "garbage": (with_blob("activation", b"GEO" * 20), "no tensor blob"),
    "cut": (
        lambda call: with_blob("activation", bytes(call.blobs["activation"])[:-1])(call),
        "checksum",
    ),
}
VANILLA_FAULTS: dict[str, tuple[Callable[[Call], Call], str]] = {
    "no-labels": (with_blob("labels", None), "has no labels"),
    "vocabulary": (with_blob("labels", fp32(torch.full((3, 8), 48.0))), "labels holds"),
    "label-count": (with_meta(tokens=1, total=1), "labels count, not 1"),
}
CASES = [(mode, name) for mode in ("vanilla", "u-shape") for name in FAULTS]
CASES += [("vanilla", name) for name in VANILLA_FAULTS]


@pytest.mark.parametrize(("mode", "fault"), CASES)
def test_a_wrong_call_is_refused_and_the_round_goes_on(mode: Mode, fault: str) -> None:
    change, words = (FAULTS | VANILLA_FAULTS)[fault]
    both = pair(mode, steps=STEPS)
    both.engine._compute._max_tokens = 512
    call = first_call(mode)
    answer = asked(both.engine, change(call))
    assert isinstance(answer, CallFailed), answer
    assert (answer.fault, answer.retry) == ("site", False)
    text = str(answer)
    assert "\n" not in text
    assert re.search(words, text), text
    both.loop.run(batch_stream("left"), STEPS)
    assert all(torch.equal(both.weights()[n], t) for n, t in clean(mode).items())


@pytest.mark.parametrize("mode", ["vanilla", "u-shape"])
def test_a_fault_in_the_midst_of_a_step_undoes_the_step(mode: Mode) -> None:
    both = pair(mode, steps=STEPS)
    call = first_call(mode)
    good = replace(call, meta={**call.meta, "total": 2 * call.meta["tokens"]})
    assert isinstance(asked(both.engine, good), Answer)
    wrong = replace(good, micro=1, blobs={**good.blobs, "mask": fp32(torch.ones(1, 1))})
    assert isinstance(asked(both.engine, wrong), CallFailed)
    late = asked(both.engine, replace(good, micro=1))
    assert isinstance(late, CallFailed) and "0 comes next" in str(late)
    both.loop.run(batch_stream("left"), STEPS)
    assert all(torch.equal(both.weights()[n], t) for n, t in clean(mode).items())


def test_a_step_that_does_not_close_what_was_sent_is_refused() -> None:
    both = pair("u-shape", steps=STEPS)
    call = first_call("u-shape")
    assert isinstance(asked(both.engine, call), Answer)
    tokens = call.meta["tokens"]
    meta = {"tokens": tokens, "micros": 1, "position": 0.0, "norms": {}}
    for changed, words in (
        ({"tokens": tokens + 1}, "closes a step"), ({"micros": 2}, "closes a step"),
        ({}, "1 backward calls are missing"),
    ):  # fmt: skip
        answer = asked(both.engine, Call("step", 1, 0, meta | changed))
        assert isinstance(answer, CallFailed) and words in str(answer)
    back = Call("backward", 1, 0, {}, {"gradient": fp32(torch.ones(3, 8, 15))})
    assert "shape" in str(asked(both.engine, back))
    both.loop.run(batch_stream("left"), STEPS)
    assert all(torch.equal(both.weights()[n], t) for n, t in clean("u-shape").items())


@pytest.mark.parametrize(
    "norms", [{"bottom": ["inf"]}, {"bottom": "much"}, [1.0], {"top": [True]}],
    ids=["infinite", "text", "list", "truth"],
)  # fmt: skip
def test_norms_that_are_none_are_refused(norms: Any) -> None:
    both = pair("vanilla", steps=STEPS)
    call = first_call("vanilla")
    asked(both.engine, call)
    meta = {"tokens": call.meta["tokens"], "micros": 1, "position": 0.0, "norms": norms}
    answer = asked(both.engine, Call("step", 1, 0, meta))
    assert isinstance(answer, CallFailed) and "norm" in str(answer)
    both.loop.run(batch_stream("left"), STEPS)
    assert both.engine.steps_done == {"a": STEPS}


def test_calls_after_the_last_step_and_of_strangers_are_refused() -> None:
    both = pair("vanilla", steps=1)
    both.loop.run(batch_stream("left"), 1)
    late = asked(both.engine, replace(first_call("vanilla"), step=2))
    assert isinstance(late, CallFailed) and "after the round's last" in str(late)
    stranger = asked(both.engine, first_call("vanilla"), site="x")
    assert isinstance(stranger, CallFailed) and "site x is not" in str(stranger)
    waiting: list[Any] = []
    for _ in range(300):
        both.engine.submit("a", Call("finish", 0), waiting.append)
    assert len(waiting) == 300 - 256 and "wait already" in str(waiting[0])


def test_forwards_without_backward_are_bounded() -> None:
    both = pair("u-shape", steps=1)
    call = first_call("u-shape")
    tokens = call.meta["tokens"]
    for micro in range(17):
        meta = {**call.meta, "total": 100 * tokens}
        answer = asked(both.engine, replace(call, micro=micro, meta=meta))
        assert isinstance(answer, Answer) == (micro < 16)
    assert "wait for their backward" in str(answer)


# -- what is not finite -------------------------------------------------------


def poisoned(tensor: Tensor) -> Callable[[], None]:
    """Let a tensor hold NaN; returns what mends it."""
    kept = tensor.detach().clone()

    def mend() -> None:
        tensor.detach().copy_(kept)

    tensor.detach().fill_(math.nan)
    return mend


def spoil(both: Pair, where: str) -> Callable[[], None]:
    model = both.site_model if where == "site" else both.cloud_model
    layer = "h.0." if where == "site" else "h.1."
    return poisoned(next(p for n, p in model.named_parameters() if layer in n and "lora_B" in n))


@pytest.mark.parametrize("where", ["site", "cloud"])
@pytest.mark.parametrize("mode", ["vanilla", "u-shape", "sfl-v1", "cse"])
def test_a_step_that_is_not_finite_is_not_taken(mode: Mode, where: str) -> None:
    both = pair(mode, replace(CONFIG, grad_accum=2), steps=6, dropout=0.1)
    stream = batch_stream()
    mends: list[Callable[[], None]] = []
    kept: dict[str, Any] = {}

    def spoiled(step: int, _: Tensor) -> None:
        if step == 2:
            kept.update(loop=both.loop.state_dict(), cloud=both.engine.state_dict()[0])
            if mode == "sfl-v1" and where == "cloud":  # the lane's own weights
                weights = both.engine._lanes["a"].half.weights()
                mends.append(poisoned(next(t for n, t in weights.items() if "lora_B" in n)))
            else:
                mends.append(spoil(both, where))

    with pytest.raises(TrainingError, match="not finite at local step 3") as caught:
        both.loop.run(stream, 6, on_step=spoiled)
    assert "\n" not in str(caught.value)
    mends[0]()
    after = both.loop.state_dict()
    for name, tensor in kept["loop"].items():
        assert "rng" in name or torch.equal(after[name], tensor), name
    cloud = both.engine.state_dict()[0] if where == "cloud" else None
    for name, tensor in kept["cloud"].items():
        assert cloud is None or "rng" in name or torch.equal(cloud[name], tensor), name
    assert all(p.grad is None for p in both.loop.half.parameters())
    assert both.loop.run(stream, 6, start=2).steps == 4
    assert both.engine.steps_done == {"a": 6}


def test_one_sites_infinite_gradient_does_not_stop_the_other() -> None:
    _, middle = parts_of(adapted(), "vanilla")
    engine = CloudEngine(middle, CONFIG, EXACT, "vanilla")
    engine.begin(1, ["a", "b"], 0, 20, 1)
    call = first_call("vanilla")
    meta = {"tokens": call.meta["tokens"], "micros": 1, "position": 0.0, "norms": {}}
    answers: dict[str, Any] = {}
    for site in ("a", "b"):
        assert isinstance(asked(engine, call, site), Answer)
    engine._lanes["b"].gradients = {
        name: tensor * math.inf for name, tensor in engine._lanes["b"].gradients.items()
    }
    for site in ("a", "b"):
        engine.submit(site, Call("step", 1, 0, meta), partial(answers.__setitem__, site))
    while len(answers) < 2:
        assert engine.work(0.0)
    assert answers["a"].meta["finite"] is True and answers["b"].meta["finite"] is False
    assert engine.steps_done == {"a": 1}
    assert all(bool(t.isfinite().all()) for t in snapshot(engine.part).values())


# -- what does not go together ------------------------------------------------


def test_settings_that_do_not_fit_are_refused() -> None:
    parts, middle = parts_of(adapted(), "vanilla")
    channel: Any = None
    for make in (
        lambda: SplitLoop(parts, channel, CONFIG, EXACT, "u-shape"),
        lambda: SplitLoop(parts, channel, CONFIG, EXACT, "parallel"),  # type: ignore[arg-type]
        lambda: SplitLoop(parts, channel, replace(CONFIG, prox_mu=0.1), EXACT, "vanilla"),
        lambda: SplitLoop(parts, channel, CONFIG, EXACT, "vanilla", in_flight=0),
        lambda: CloudEngine(middle, CONFIG, EXACT, "u-shape"),
    ):
        with pytest.raises(ConfigError):
            make()


def test_a_tied_weight_is_not_trained_on_both_sides() -> None:
    parts = split_parts(small_model("gpt2"), cut_for("vanilla"))
    with pytest.raises(ConfigError, match="hold a copy each"):
        CloudEngine(parts["middle"], CONFIG, EXACT, "vanilla")
    with pytest.raises(ConfigError, match="hold a copy each"):
        SplitLoop({"bottom": parts["bottom"]}, Direct(None), CONFIG, EXACT, "vanilla")  # type: ignore[arg-type]


def test_an_error_of_a_call_reaches_the_caller_as_it_is() -> None:
    both = pair("vanilla", steps=STEPS)
    submit, calls = both.channel.submit, iter(range(100))

    def lossy(call: Call) -> Any:
        future = submit(call)
        if next(calls) == 3:
            future.result()
            both.engine.leave("a")
        return future

    both.channel.submit = lossy  # type: ignore[method-assign]
    before = both.loop.state_dict()
    with pytest.raises(SplitError, match="no longer"):
        both.loop.run(batch_stream(), STEPS)
    assert before.keys() <= both.loop.state_dict().keys()
