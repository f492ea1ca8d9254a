"""Server optimizers beside Flower's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import FedAvgM, FedYogi
from torch import Tensor

from flower_geo.aggregation import ServerOptimizer


def walk(rounds: int) -> list[Tensor]:
    maker = torch.Generator().manual_seed(3)
    return [0.01 * torch.randn(6, 5, generator=maker) for _ in range(rounds)]


def ours(optimizer: ServerOptimizer, start: Tensor, changes: list[Tensor]) -> Tensor:
    now, state = start, {}  # type: ignore[var-annotated]
    for change in changes:
        now, state = optimizer.step(now, now + change, state)
    return now


def flowers(strategy: Any, start: Tensor, changes: list[Tensor], patch: Any) -> Tensor:
    """The strategy's own arithmetic on given means, round after round."""
    now = start
    for round, change in enumerate(changes, 1):
        strategy.current_arrays = (
            ArrayRecord({"w": Array(now.numpy())})
            if isinstance(strategy, FedAvgM)
            else {"w": now.numpy()}
        )
        mean = ArrayRecord({"w": Array((now + change).numpy())})
        patch(lambda self, server_round, replies, mean=mean: (mean, None))
        made, _ = strategy.aggregate_train(round, [])
        now = torch.from_numpy(np.array(made["w"].numpy())).float()
    return now


def patched(monkeypatch: pytest.MonkeyPatch) -> Any:
    from flwr.serverapp.strategy import FedAvg

    return lambda replacement: monkeypatch.setattr(FedAvg, "aggregate_train", replacement)


def test_momentum_is_flowers(monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.ones(6, 5)
    theirs = flowers(
        FedAvgM(server_learning_rate=0.7, server_momentum=0.8), start, walk(5), patched(monkeypatch)
    )
    mine = ours(ServerOptimizer("momentum", lr=0.7, momentum=0.8), start, walk(5))
    torch.testing.assert_close(mine, theirs)


def test_yogi_is_flowers(monkeypatch: pytest.MonkeyPatch) -> None:
    start = torch.ones(6, 5)
    theirs = flowers(
        FedYogi(eta=0.02, beta_1=0.9, beta_2=0.99, tau=1e-3), start, walk(5), patched(monkeypatch)
    )
    mine = ours(ServerOptimizer("yogi", lr=0.02), start, walk(5))
    torch.testing.assert_close(mine, theirs)


def test_adam_by_hand() -> None:
    optimizer = ServerOptimizer("adam", lr=0.1, momentum=0.5, beta2=0.75, tau=0.01)
    one, state = optimizer.step(torch.tensor([1.0]), torch.tensor([3.0]), {})
    # first = 0.5 * 2, second = 0.25 * 4
    torch.testing.assert_close(one, torch.tensor([1 + 0.1 * 1 / (1 + 0.01)]))
    two, _ = optimizer.step(one, one, state)
    torch.testing.assert_close(two, one + 0.1 * 0.5 / (0.75**0.5 + 0.01))


def test_the_mean_itself_is_taken_to_the_bit() -> None:
    before, mean = torch.randn(9), torch.randn(9)
    after, state = ServerOptimizer().step(before, mean, {})
    assert torch.equal(after, mean) and state == {}
    half, _ = ServerOptimizer(lr=0.5).step(before, mean, {})
    torch.testing.assert_close(half, (before + mean) / 2)


@pytest.mark.parametrize("kind", ["momentum", "adam", "yogi"])
def test_a_step_changes_nothing_it_was_given(kind: Any) -> None:
    optimizer = ServerOptimizer(kind)
    before, mean = torch.randn(4), torch.randn(4)
    _, state = optimizer.step(before, mean, {})
    kept = {key: tensor.clone() for key, tensor in state.items()}
    held = before.clone(), mean.clone()
    optimizer.step(before, mean, state)
    assert torch.equal(before, held[0]) and torch.equal(mean, held[1])
    assert all(torch.equal(state[key], kept[key]) for key in kept)
