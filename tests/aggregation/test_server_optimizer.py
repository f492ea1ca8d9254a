"""Server optimisers beside Flower's own strategies, and on adapters that come and go."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdam, FedAvgM, FedYogi
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load, save
from torch import Tensor

from flower_geo.aggregation.server_optimizer import SERVER_OPTIMIZERS, ServerOptimizer
from flower_geo.errors import ConfigError, FactorError, ResumeMismatch

SHAPES = {"lora_A": (4, 6), "lora_B": (5, 4)}


def tensors(seed: int, size: float = 1.0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: size * torch.randn(shape, generator=generator) for k, shape in SHAPES.items()}


def flower(strategy: Any, before: dict[str, Tensor], means: list[dict[str, Tensor]]) -> Any:
    """What Flower's strategy makes of rounds in which one node answers with the mean."""
    arrays = {name: value.numpy() for name, value in before.items()}
    for number, mean in enumerate(means, start=1):
        strategy.current_arrays = {name: value.copy() for name, value in arrays.items()}
        if isinstance(strategy, FedAvgM):
            strategy.current_arrays = ArrayRecord({k: Array(v) for k, v in arrays.items()})
        request = Message(
            RecordDict({"config": ConfigRecord()}), dst_node_id=1, message_type="train"
        )
        content = RecordDict({
            "arrays": ArrayRecord({k: Array(v.numpy()) for k, v in mean.items()}),
            "metrics": MetricRecord({"num-examples": 1}),
        })  # fmt: skip
        record, _ = strategy.aggregate_train(number, [Message(content, reply_to=request)])
        assert record is not None
        arrays = {name: array.numpy() for name, array in record.items()}
        yield arrays


PEERS = [
    (ServerOptimizer("momentum", lr=0.7, momentum=0.8),
     lambda: FedAvgM(server_learning_rate=0.7, server_momentum=0.8)),
    (ServerOptimizer("avg", lr=0.5), lambda: FedAvgM(server_learning_rate=0.5)),
    (ServerOptimizer("adam", lr=0.01), lambda: FedAdam(eta=0.01, beta_1=0.9, beta_2=0.99)),
    (ServerOptimizer("adam", lr=0.1, beta1=0.5, beta2=0.9, tau=0.01),
     lambda: FedAdam(eta=0.1, beta_1=0.5, beta_2=0.9, tau=0.01)),
    (ServerOptimizer("yogi", lr=0.01), lambda: FedYogi(eta=0.01)),
]  # fmt: skip


@pytest.mark.parametrize(("ours", "peer"), PEERS, ids=lambda value: getattr(value, "kind", ""))
def test_same_numbers_as_flower(
    ours: ServerOptimizer, peer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_run_id", "_node_id", "_task_id"):  # no message is made without them
        monkeypatch.setattr(TaskIdentity, name, 1)
    before, state = tensors(0), None
    means = [tensors(seed) for seed in range(1, 7)]
    for mean, theirs in zip(means, flower(peer(), before, means), strict=True):
        before, state = ours.step(before, mean, state)
        for name, value in theirs.items():
            np.testing.assert_allclose(before[name].numpy(), value, rtol=1e-4, atol=1e-6)


def test_avg_with_lr_one_is_the_mean_to_the_bit() -> None:
    before, mean = tensors(0, 1e6), tensors(1, 1e-6)
    after, state = ServerOptimizer().step(before, mean)
    assert all(torch.equal(after[name], mean[name]) for name in mean)
    assert state == {}


def test_first_steps_by_hand() -> None:
    before, mean = {"w": torch.zeros(1)}, {"w": torch.full((1,), 2.0)}
    after, state = ServerOptimizer("momentum", lr=1.0, momentum=0.5).step(before, mean)
    assert float(after["w"]) == 2.0
    after, _ = ServerOptimizer("momentum", lr=1.0, momentum=0.5).step(after, after, state)
    assert float(after["w"]) == 3.0  # nothing came back changed, momentum goes on
    after, state = ServerOptimizer("yogi", lr=0.1, beta1=0.0, beta2=0.0, tau=2.0).step(before, mean)
    assert float(after["w"]) == pytest.approx(0.1 * 2 / (2 + 2))
    assert float(state["second/w"]) == 4.0
    assert int(state["steps/w"]) == 1


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
def test_state_goes_through_a_file_to_the_bit(kind: str) -> None:
    optimizer, before = ServerOptimizer(kind, lr=0.1), tensors(0)
    after, state = optimizer.step(before, tensors(1))
    one, one_state = optimizer.step(after, tensors(2), state)
    other, other_state = optimizer.step(after, tensors(2), load(save(state)))
    assert all(torch.equal(one[name], other[name]) for name in SHAPES)
    assert one_state.keys() == other_state.keys()
    assert all(torch.equal(one_state[name], other_state[name]) for name in one_state)


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
def test_the_idle_side_stays_and_keeps_its_state(kind: str) -> None:
    optimizer, before = ServerOptimizer(kind, lr=0.1), tensors(0)
    after, state = optimizer.step(before, tensors(1))
    kept = {name: value.clone() for name, value in state.items()}
    again, moved = optimizer.step(after, {"lora_A": tensors(2)["lora_A"]}, state)
    assert list(again) == list(before)
    assert torch.equal(again["lora_B"], after["lora_B"])
    assert not torch.equal(again["lora_A"], after["lora_A"])
    for name, value in kept.items():
        assert torch.equal(state[name], value)  # what was given is not changed
        if name.endswith("lora_B"):
            assert torch.equal(moved[name], value)


@pytest.mark.parametrize("kind", SERVER_OPTIMIZERS)
def test_nothing_learnt_moves_nothing(kind: str) -> None:
    before = tensors(0)
    after, _ = ServerOptimizer(kind, lr=0.1).step(before, before)
    assert all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"kind": "sgd"}, "no server optimiser 'sgd'"),
        ({"lr": 0.0}, "lr is 0.0"),
        ({"lr": float("nan")}, "lr is nan"),
        ({"tau": 0.0}, "tau is 0.0"),
        ({"momentum": 1.0}, "momentum is 1.0"),
        ({"beta1": -0.1}, "beta1 is -0.1"),
        ({"beta2": 1.0}, "beta2 is 1.0"),
    ],
)
def test_values_out_of_range(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerOptimizer(**values)


def test_tensors_that_do_not_fit() -> None:
    optimizer, before = ServerOptimizer("adam", lr=0.1), tensors(0)
    with pytest.raises(FactorError, match=r"never sent out: .*'head'"):
        optimizer.step(before, {"head": torch.zeros(2)})
    with pytest.raises(FactorError, match="lora_A: the mean has shape"):
        optimizer.step(before, {"lora_A": torch.zeros(4, 7)})
    _, state = optimizer.step(before, tensors(1))
    with pytest.raises(ResumeMismatch, match="state of lora_A has shape"):
        optimizer.step({"lora_A": torch.zeros(8, 6)}, {"lora_A": torch.ones(8, 6)}, state)
