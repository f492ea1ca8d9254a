"""Optimizers of the coordinator: what the mean of the sites' weights becomes.

With ``d = mean - before``: FedAvg takes the mean, FedAvgM adds a running sum of ``d``
(arXiv:1909.06335), FedAdam and FedYogi divide a running mean of ``d`` by the root of its
second moment (arXiv:2003.00295, algorithm 2, without Adam's correction of the bias).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

__all__ = ["ServerOptimizer"]


class ServerOptimizer:
    """One tensor at a time; the state belongs to the caller.

    Args:
        kind: ``avg``, ``momentum``, ``adam`` or ``yogi``.
        lr: server learning rate.
        momentum: of ``momentum``; beta 1 of the other two.
        beta2: of ``adam`` and ``yogi``.
        tau: added to the root of the second moment.
    """

    def __init__(
        self,
        kind: Literal["avg", "momentum", "adam", "yogi"] = "avg",
        lr: float = 1.0,
        momentum: float = 0.9,
        beta2: float = 0.99,
        tau: float = 1e-3,
    ) -> None:
        self.kind = kind
        self.lr = lr
        self.momentum = momentum
        self.beta2 = beta2
        self.tau = tau

    def step(
        self, before: Tensor, mean: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """One step from ``before`` on the ``mean`` of what came of it.

        Args:
            before: fp32 tensor the sites trained from.
            mean: their mean, of the same shape.
            state: what the last step of this tensor returned; empty at first.

        Returns:
            The next fp32 tensor, and fp32 state; neither argument is changed.
        """
        if self.kind == "avg" and self.lr == 1:
            return mean.float(), {}  # to the bit
        start, change = before.double(), mean.double() - before.double()
        if self.kind == "avg":
            return (start + self.lr * change).float(), {}
        first = state.get("first", torch.zeros_like(before)).double()
        if self.kind == "momentum":
            first = self.momentum * first + change
            return (start + self.lr * first).float(), {"first": first.float()}
        first = self.momentum * first + (1 - self.momentum) * change
        second = state.get("second", torch.zeros_like(before)).double()
        square = change**2
        if self.kind == "adam":
            second = self.beta2 * second + (1 - self.beta2) * square
        else:
            second = second - (1 - self.beta2) * square * torch.sign(second - square)
        after = start + self.lr * first / (second.sqrt() + self.tau)
        return after.float(), {"first": first.float(), "second": second.float()}
