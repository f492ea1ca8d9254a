"""Counting over the steps of a round: losses, norms, and the first step that was not finite."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DeviceTally", "HostTally", "InnerResult", "RoundSoFar", "Tally"]


@dataclass(frozen=True)
class InnerResult:
    """What one call of ``InnerLoop.run`` did.

    Steps without a token to predict are no part of losses and norms, which are 0
    where no step had one.

    Attributes:
        steps: optimizer steps taken, those passed over for want of a token included.
        tokens: tokens predicted, over all batches.
        seconds: wall time.
        loss_first: loss of the first step, in nats a token, before it was taken.
        loss_last: loss of the last step, before it was taken.
        loss_mean: mean over the steps.
        grad_norm: mean global norm of the gradient, before clipping.
    """

    steps: int
    tokens: int
    seconds: float
    loss_first: float
    loss_last: float
    loss_mean: float
    grad_norm: float


@dataclass(frozen=True)
class RoundSoFar:
    """A round that is not over: what a run that goes on in it needs to count all of it.

    Plain numbers, so that JSON keeps them to the last bit.

    Attributes:
        steps: local steps done.
        tokens: tokens predicted by then.
        seconds: time spent by then.
        loss_first, loss_last: losses of the first and the newest step.
        losses, norms: sums over the steps, of the loss and of the gradient's norm.
        empty: steps among them that had no token to predict.
    """

    steps: int
    tokens: int
    seconds: float
    loss_first: float
    loss_last: float
    losses: float
    norms: float
    empty: int = 0


#: First and last loss, sum of losses and of norms where no step had a token.
_NOTHING = (0.0, 0.0, 0.0, 0.0)


class Tally(ABC):
    """Sums over the steps of one round.

    Args:
        carried: the part of the round that was counted before.
    """

    def __init__(self, carried: RoundSoFar | None = None) -> None:
        self.steps = carried.steps if carried else 0
        self.tokens = carried.tokens if carried else 0
        self.empty = carried.empty if carried else 0

    @property
    def full(self) -> int:
        """Steps that had something to predict."""
        return self.steps - self.empty

    def skip(self) -> None:
        """Count a step that has nothing to predict and is passed over."""
        self.steps += 1
        self.empty += 1

    def add(self, loss: Tensor, norm: Tensor, tokens: int, step: int) -> None:
        """Count a step, before it is taken."""
        self.steps += 1
        self.tokens += tokens
        self._count(loss, norm, step)

    def so_far(self, seconds: float) -> RoundSoFar:
        """What to carry over; needs a step, waits for the device."""
        first, last, losses, norms = self._sums() if self.full else _NOTHING
        return RoundSoFar(self.steps, self.tokens, seconds, first, last, losses, norms, self.empty)

    def result(self, seconds: float) -> InnerResult:
        """The round so far; waits for the device."""
        first, last, losses, norms = self._sums() if self.full else _NOTHING
        full = max(self.full, 1)
        return InnerResult(
            steps=self.steps,
            tokens=self.tokens,
            seconds=seconds,
            loss_first=first,
            loss_last=last,
            loss_mean=losses / full,
            grad_norm=norms / full,
        )

    @abstractmethod
    def first_bad(self) -> tuple[int, float] | None:
        """The first step that was not finite and its loss; waits for the device."""

    @abstractmethod
    def _count(self, loss: Tensor, norm: Tensor, step: int) -> None: ...

    @abstractmethod
    def _sums(self) -> tuple[float, float, float, float]: ...


class HostTally(Tally):
    """Python numbers, for devices whose results are there when asked for."""

    def __init__(self, carried: RoundSoFar | None = None) -> None:
        super().__init__(carried)
        self._first = carried.loss_first if carried else math.nan
        self._last = carried.loss_last if carried else math.nan
        self._losses = carried.losses if carried else 0.0
        self._norms = carried.norms if carried else 0.0
        self._bad: tuple[int, float] | None = None

    def _count(self, loss: Tensor, norm: Tensor, step: int) -> None:
        self._last, size = loss.item(), norm.item()
        if self.full == 1:
            self._first = self._last
        self._losses += self._last
        self._norms += size
        if self._bad is None and not math.isfinite(self._last + size):
            self._bad = (step, self._last)

    def first_bad(self) -> tuple[int, float] | None:
        """The first step that was not finite and its loss."""
        return self._bad

    def _sums(self) -> tuple[float, float, float, float]:
        return self._first, self._last, self._losses, self._norms


class DeviceTally(Tally):
    """Tensors on the device, so that counting waits for nothing.

    A step that was not finite sticks: no later step counts as good either.
    """

    def __init__(self, device: torch.device, carried: RoundSoFar | None = None) -> None:
        super().__init__(carried)

        def number(value: float) -> Tensor:
            return torch.tensor(value, dtype=torch.float64, device=device)

        known = carried is not None and carried.steps > carried.empty
        self._first = number(carried.loss_first) if carried and known else None
        self._last = number(carried.loss_last) if carried and known else None
        self._losses = number(carried.losses if carried else 0.0)
        self._norms = number(carried.norms if carried else 0.0)
        self._bad_step = torch.full((), -1, dtype=torch.long, device=device)
        self._bad_loss = torch.zeros((), device=device)

    def _count(self, loss: Tensor, norm: Tensor, step: int) -> None:
        self._first = loss if self._first is None else self._first
        self._last = loss
        self._losses += loss
        self._norms += norm
        fresh = ~torch.isfinite(loss + norm) & (self._bad_step < 0)
        self._bad_step = torch.where(fresh, step, self._bad_step)
        self._bad_loss = torch.where(fresh, loss.float(), self._bad_loss)

    def bad(self) -> Tensor:
        """1.0 when a step was not finite, as fused optimizers want it."""
        return (self._bad_step >= 0).float()

    def first_bad(self) -> tuple[int, float] | None:
        """The first step that was not finite and its loss; waits for the device."""
        step = int(self._bad_step)
        return None if step < 0 else (step, float(self._bad_loss))

    def _sums(self) -> tuple[float, float, float, float]:
        assert self._first is not None and self._last is not None
        return float(self._first), float(self._last), float(self._losses), float(self._norms)
