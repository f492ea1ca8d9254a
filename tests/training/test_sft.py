"""What TRL's trainer must not do, and what it must be told."""

from __future__ import annotations

import inspect
import logging
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flower_geo.errors import TrainingError
from flower_geo.training import InnerConfig, TrlLoop, learning_rate
from flower_geo.training import sft as sft_module
from tests.training.conftest import VOCAB, adapted, labelled, small, untied, with_dropout

CONFIG = InnerConfig(lr=3e-3, warmup_steps=3, total_steps=20)


def numpys() -> list[int]:
    state: Any = np.random.get_state()
    return list(state[1])


def test_rounds_leave_no_trace_but_in_the_weights(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a call to the network")

    import trl.trainer.base_trainer as trl_base

    for name in ("CI", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(trl_base, "send_telemetry", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = adapted(small()).eval()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    states = random.getstate(), numpys(), torch.get_rng_state()
    use_cache = model.config.use_cache
    capfd.readouterr()
    with caplog.at_level(logging.WARNING):
        loop = TrlLoop(model, CONFIG)
        for position in (0, 2):
            loop.run(labelled(), steps=2, position=position)
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert not caplog.records
    assert list(tmp_path.iterdir()) == []
    assert random.getstate() == states[0]
    assert numpys() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert model.config.use_cache is use_cache and not model.training
    assert all(p.grad is None for p in model.parameters())
    assert model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.shape == (1, 4, VOCAB)


def test_the_trainer_is_built_once_and_forgets_its_rounds() -> None:
    loop = TrlLoop(adapted(small()), CONFIG)
    trainer = loop._trainer
    for position in range(0, 12, 2):
        loop.run(labelled(), steps=2, position=position)
        assert loop._trainer is trainer
        assert not trainer._metrics["train"] and not trainer.state.log_history
        assert len(trainer.accelerator._models) <= 1 and len(trainer.accelerator._optimizers) <= 1


def test_one_schedule_runs_over_all_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = TrlLoop(with_dropout(), CONFIG)
    rates: list[float] = []
    step = loop._optimizer.step

    def watched(*values: Any) -> Any:
        rates.append(loop._optimizer.param_groups[0]["lr"])
        return step(*values)

    monkeypatch.setattr(loop._optimizer, "step", watched)
    for position in (0, 4, 8):
        loop.run(labelled(), steps=4, position=position, span=4)
    loop.run(labelled(), steps=2, position=12, span=6)
    assert rates == [learning_rate(CONFIG, place) for place in (*range(12), 12, 15)]


def test_a_head_with_an_adapter_is_refused_with_the_reason() -> None:
    model = adapted(untied(), target_modules=["q_proj", "lm_head"])
    with pytest.raises(TrainingError, match=r"lm_head.*lean loop") as caught:
        TrlLoop(model, CONFIG)
    assert "\n" not in str(caught.value)


def test_without_trl_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("trl", "trl.trainer.sft_config"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TrainingError, match=r"flower-geo\[align\]") as caught:
        TrlLoop(small(), CONFIG)
    assert "\n" not in str(caught.value)


def test_bf16_is_used_where_asked_for() -> None:
    model = adapted(small())
    rough = TrlLoop(model, InnerConfig(lr=1e-3, precision="bf16")).run(labelled(), steps=2)
    exact = TrlLoop(adapted(small()), InnerConfig(lr=1e-3)).run(labelled(), steps=2)
    assert rough.loss_last != exact.loss_last
    assert rough.loss_last == pytest.approx(exact.loss_last, rel=2e-2)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_the_lean_loop_does_not_import_trl() -> None:
    code = """
import sys, types, torch
from flower_geo.training import InnerConfig, InnerLoop

class Model(torch.nn.Linear):
    def forward(self, input_ids, labels, use_cache):
        loss = super().forward(input_ids.float()).square().mean()
        return types.SimpleNamespace(loss=loss)

InnerLoop(Model(4, 1), InnerConfig()).run(lambda: torch.ones(2, 4, dtype=torch.long), steps=1)
assert not {"trl", "transformers", "accelerate"} & sys.modules.keys()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_class_of_the_trainer_is_made_once() -> None:
    assert sft_module._trainer_class() is sft_module._trainer_class()


def heads(model: Any) -> int:
    """Forwards of trainers that one call of the model goes through."""
    count, forward = 0, model.get_base_model().forward
    while "fused_lm_head" in forward.__code__.co_varnames:
        count += 1
        forward = inspect.getclosurevars(forward.__func__).nonlocals["original_forward"]
    return count


def test_a_second_loop_on_a_model_puts_no_forward_on_top() -> None:
    model, twin = adapted(small()), adapted(small())
    ids = torch.arange(4)[None]
    plain = model(input_ids=ids).logits
    loops = [TrlLoop(model, CONFIG) for _ in range(3)]
    assert heads(model) == 1
    assert torch.equal(model(input_ids=ids).logits, plain)
    # The earlier loop still trains, as the only one on its model would.
    for loop in (loops[0], TrlLoop(twin, CONFIG)):
        loop.run(labelled(), steps=2)
    ours, theirs = (dict(each.named_parameters()) for each in (model, twin))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_forward_of_the_callers_own_stays_under_the_trainers() -> None:
    model = adapted(small())
    plain, calls = model.get_base_model(), 0
    inner = plain.forward

    def counting(self: Any, *values: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return inner(*values, **named)

    plain.forward = counting.__get__(plain)
    for _ in range(2):
        TrlLoop(model, CONFIG)
    model(input_ids=torch.arange(4)[None])
    assert calls == 1


@pytest.mark.parametrize("flag", ["is_loaded_in_4bit", "is_loaded_in_8bit"])
def test_adapters_on_a_quantised_base_stay_fp32_to_the_bit(flag: str) -> None:
    """TRL rounds them to bf16 when it is told that the base is quantised."""
    model, twin = adapted(small()), adapted(small())
    setattr(model.get_base_model(), flag, True)
    before = {name: p.clone() for name, p in model.named_parameters()}
    loop = TrlLoop(model, CONFIG)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    # And they train as on any other base.
    loop.run(labelled(), steps=2)
    TrlLoop(twin, CONFIG).run(labelled(), steps=2)
    other = dict(twin.named_parameters())
    assert all(torch.equal(p, other[name]) for name, p in model.named_parameters())
