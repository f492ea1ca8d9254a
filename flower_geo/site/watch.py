"""Who looks on while a request is served: told how far it is, asked whether to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Leaving", "Watch"]


class Leaving(Exception):
    """The process was told to end; what was done so far lies in a snapshot."""


class Watch:
    """Nobody: takes every notice and never asks to end."""

    def phase(self, name: str) -> None:
        """A part of the work begins: ``model``, ``data``, ``base``, ``training``, ..."""

    def step(self, done: int, of: int | None, loss: Tensor) -> None:
        """An optimizer step was taken.

        Args:
            done: steps of this round so far.
            of: steps of the round; None where time ends it.
            loss: of the step, 0-d; reading it waits for the device.
        """

    def stored(self, steps: int) -> None:
        """A snapshot holds the round up to that step."""

    def leaving(self) -> bool:
        """Whether the process was told to end."""
        return False
