"""Server optimisers: how far, and which way, from the weights before a round to their mean."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flower_geo.aggregation.outer import OuterSGD
from flower_geo.errors import ConfigError, FactorError, ResumeMismatch

__all__ = ["SERVER_OPTIMIZERS", "ServerOptimizer"]

#: Kinds of :class:`ServerOptimizer`.
SERVER_OPTIMIZERS = ("avg", "momentum", "adam", "yogi")
#: First part of the state's keys, "KIND/NAME": both moments, and steps taken.
_FIRST, _SECOND, _STEPS = "first", "second", "steps"


@dataclass(frozen=True)
class ServerOptimizer:
    """Adaptive federated optimisation (arXiv:2003.00295) on named tensors.

    With ``d = mean - before``:

    - ``avg``: ``before + lr * d``; with lr 1 the mean to the bit.
    - ``momentum``: ``m = momentum * m + d``, ``before + lr * m``, as Flower's FedAvgM.
    - ``adam``: ``m = beta1 m + (1 - beta1) d``, ``v = beta2 v + (1 - beta2) d^2``,
      ``before + lr_t m / (sqrt(v) + tau)``, as Flower's FedAdam; in its t-th step
      ``lr_t = lr sqrt(1 - beta2^(t+1)) / (1 - beta1^(t+1))``.
    - ``yogi``: v changes by ``(1 - beta2) d^2`` towards ``d^2`` and lr is as given, as
      Flower's FedYogi.

    A step of adam or yogi is about lr in every value, whatever the size of ``d``:
    lr belongs to the size of an adapter's change a round, 1e-3 to 1e-2.  State is
    kept a tensor, so it means something only where the next round's tensor is the
    last one's continued: after a rule that turns an adapter's columns (``svd``,
    ``stack``) take ``avg``.

    Attributes:
        kind: one of :data:`SERVER_OPTIMIZERS`.
        lr: > 0.
        momentum: of ``momentum``, in [0, 1).
        beta1: of ``adam`` and ``yogi``, in [0, 1).
        beta2: of ``adam`` and ``yogi``, in [0, 1).
        tau: of ``adam`` and ``yogi``, > 0.

    Raises:
        ConfigError: a value out of its range.
    """

    kind: str = "avg"
    lr: float = 1.0
    momentum: float = 0.9
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        if self.kind not in SERVER_OPTIMIZERS:
            known = ", ".join(SERVER_OPTIMIZERS)
            raise ConfigError(f"no server optimiser {self.kind!r}: there are {known}")
        for name in ("lr", "tau"):
            value = getattr(self, name)
            if not math.isfinite(value) or value <= 0:
                raise ConfigError(f"server optimiser: {name} is {value}; it must be above 0")
        for name in ("momentum", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 <= value < 1:
                raise ConfigError(f"server optimiser: {name} is {value}; it must be in [0, 1)")

    def step(
        self,
        before: Mapping[str, Tensor],
        mean: Mapping[str, Tensor],
        state: Mapping[str, Tensor] | None = None,
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The tensors after the round, and the state for the next.

        Args:
            before: fp32 tensors as they were sent out.
            mean: fp32 or fp64 mean of what came back, of the same shapes; a name that
                is not in it stays as it is, and so does its state.
            state: of the last step, None before the first.

        Returns:
            New fp32 tensors by the names of ``before`` in their order, and a flat dict of
            tensors for a checkpoint; the inputs are not changed.

        Raises:
            FactorError: ``mean`` has a name ``before`` has not, or another shape.
            ResumeMismatch: the state belongs to tensors of other shapes.
        """
        unknown = [name for name in mean if name not in before]
        if unknown:
            raise FactorError(f"the mean has tensors that were never sent out: {unknown[:3]}")
        after, kept = {}, dict(state or {})
        for name, start in before.items():
            if name not in mean:
                after[name] = start.float().clone()
                continue
            if mean[name].shape != start.shape:
                raise FactorError(
                    f"{name}: the mean has shape {list(mean[name].shape)}, what was sent out "
                    f"{list(start.shape)}"
                )
            after[name], own = self._one(name, start, mean[name].double(), kept)
            kept |= {f"{kind}/{name}": value for kind, value in own.items()}
        return after, kept

    def _one(
        self, name: str, start: Tensor, mean: Tensor, state: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        first, second = (self._moment(kind, name, start, state) for kind in (_FIRST, _SECOND))
        if self.kind in ("avg", "momentum"):
            momentum = self.momentum if self.kind == "momentum" else 0.0
            outer = OuterSGD(self.lr, momentum, nesterov=False)
            after, buffer = outer.step(start, start, mean, first)
            return after, {} if buffer is None else {_FIRST: buffer}
        change = mean - start.double()
        square = change.square()
        m = (1 - self.beta1) * change
        if first is not None:
            m += self.beta1 * first.double()
        v = torch.zeros_like(change) if second is None else second.double()
        steps = 1 + int(state.get(f"{_STEPS}/{name}", torch.tensor(0)))
        lr = self.lr
        if self.kind == "adam":
            v = self.beta2 * v + (1 - self.beta2) * square
            lr *= math.sqrt(1 - self.beta2 ** (steps + 1)) / (1 - self.beta1 ** (steps + 1))
        else:
            v = v - (1 - self.beta2) * square * torch.sign(v - square)
        after = start.double() + lr * m / (v.sqrt() + self.tau)
        return after.float(), {
            _FIRST: m.float(), _SECOND: v.float(), _STEPS: torch.tensor(steps),
        }  # fmt: skip

    @staticmethod
    def _moment(kind: str, name: str, start: Tensor, state: Mapping[str, Tensor]) -> Tensor | None:
        found = state.get(f"{kind}/{name}")
        if found is not None and found.shape != start.shape:
            raise ResumeMismatch(
                f"the server optimiser's state of {name} has shape {list(found.shape)}, the "
                f"tensor {list(start.shape)}: it belongs to another adapter"
            )
        return found
