"""One round of local steps while it is under way: its end, and its place in the schedule."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flower_geo.evaluation.batch import Batch
from flower_geo.training.tally import RoundSoFar, Tally

__all__ = ["Round", "is_over"]


@dataclass
class Round:
    """A round of local steps.

    Attributes:
        next_batch: gives the next batch.
        steps: local steps of the round; None where only time ends it.
        seconds: time it may take; None where only steps end it.
        position: schedule position of its start.
        span: schedule steps it stands for.
        on_step: called after each step.
        tally: what was counted.
        began: clock at the start, less the time spent before a resumption.
        step: local steps done.
    """

    next_batch: Callable[[], Batch]
    steps: int | None
    seconds: float | None
    position: float
    span: float
    on_step: Callable[[int, Tensor], None] | None
    tally: Tally
    began: float
    step: int

    def elapsed(self) -> float:
        """Seconds since the round began."""
        return time.perf_counter() - self.began

    def place(self) -> float:
        """Schedule position of the step to be taken."""
        elapsed = self.elapsed()
        # span * step / steps in this order: with span == steps it is the whole number ``step``.
        done = self.span * self.step / self.steps if self.steps else 0.0
        if self.seconds is not None:
            by_time = self.span * min(elapsed / self.seconds, 1.0) if self.seconds > 0 else 0.0
            done = max(done, by_time)
        return self.position + done

    def stepped(self, loss: Tensor) -> None:
        """A step was taken."""
        self.step += 1
        if self.on_step is not None:
            self.on_step(self.step, loss)

    def ends(self, settle: Callable[[], None]) -> bool:
        """Whether the step just taken was the last; ``settle`` waits for the device."""
        if self.step == self.steps:
            return True
        if self.seconds is None:
            return False
        settle()
        return self.elapsed() >= self.seconds


def is_over(carried: RoundSoFar, steps: int | None, seconds: float | None) -> bool:
    """Whether nothing is left of a round that was broken off."""
    by_steps = steps is not None and carried.steps >= steps
    return by_steps or (seconds is not None and carried.seconds >= seconds)
