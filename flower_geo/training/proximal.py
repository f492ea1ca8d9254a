"""FedProx: a pull back to the weights a round began with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flower_geo.errors import TrainingError

__all__ = ["START", "RoundStart"]

#: Prefix of the starting weights in a loop's state.
START = "round_start/"


class RoundStart:
    """The term mu/2 · |x − x₀|² over the trained parameters, x₀ being the round's start.

    Its gradient mu · (x − x₀) is added to that of the loss before clipping; the
    loss that is reported is without it.

    Args:
        mu: strength; 0 = off, and nothing is kept.
    """

    def __init__(self, mu: float) -> None:
        self.mu = mu
        self._weights: dict[str, Tensor] = {}
        self._parameters: dict[str, nn.Parameter] = {}

    def begin(self, parameters: Mapping[str, nn.Parameter], *, inside: bool) -> None:
        """Start a round from the weights as they are, or go on inside one from ``load``.

        Raises:
            TrainingError: to go on, but the start of that round is not known.
        """
        if not self.mu:
            return
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        if not inside:
            self._weights = {name: p.detach().clone() for name, p in self._parameters.items()}
            return
        wanted = {name: p.shape for name, p in self._parameters.items()}
        if {name: start.shape for name, start in self._weights.items()} != wanted:
            raise TrainingError(
                "the weights this round began with are not known, which prox-mu needs; "
                "load the state taken within the round, or begin the round anew"
            )
        self._weights = {
            name: self._weights[name].to(p.device, p.dtype) for name, p in self._parameters.items()
        }

    @torch.no_grad()
    def pull(self) -> None:
        """Add the term's gradient to that of each parameter that has one."""
        if not self.mu:
            return
        moved, starts, grads = [], [], []
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                moved.append(parameter.detach())
                starts.append(self._weights[name])
                grads.append(parameter.grad)
        if moved:
            torch._foreach_add_(grads, torch._foreach_sub(moved, starts), alpha=self.mu)

    def state(self) -> dict[str, Tensor]:
        """CPU copies of the starting weights, under ``round_start/<parameter>``."""
        return {
            START + name: start.to("cpu", copy=True).contiguous()
            for name, start in self._weights.items()
        }

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take the starting weights out of a loop's state; they count in the round gone on with."""
        self._weights = {
            key.removeprefix(START): value.clone()
            for key, value in state.items()
            if self.mu and key.startswith(START)
        }
