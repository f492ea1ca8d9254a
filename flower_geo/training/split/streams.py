"""Random streams that stand in for torch's global ones while a part runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

__all__ = ["Stream"]

_CPU, _CUDA = "cpu", "cuda"


class Stream:
    """What dropout of one part draws from, whatever else draws in between.

    Args:
        device: of the part.
        seed: of the stream; None = from torch's global state as it is now.
    """

    def __init__(self, device: torch.device, seed: int | None = None) -> None:
        self._device = device
        self._state = self._live() if seed is None else self._seeded(seed)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let torch's global generators be this stream; the caller's go on afterwards."""
        callers = self._live()
        self._set(self._state)
        try:
            yield
        finally:
            self._state = self._live()
            self._set(callers)

    def number(self) -> int:
        """A number that follows from where the stream stands, without moving it."""
        generator = torch.Generator()
        generator.set_state(self._state[_CPU])
        return int(torch.randint(2**62, (), generator=generator))

    def state(self) -> dict[str, Tensor]:
        """Where it stands: "cpu" and on CUDA "cuda" (uint8)."""
        return {name: state.clone() for name, state in self._state.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken; what it does not name stays."""
        self._state |= {name: state[name].clone() for name in self._state if name in state}

    def _seeded(self, seed: int) -> dict[str, Tensor]:
        state = {_CPU: torch.Generator().manual_seed(seed).get_state()}
        if self._device.type == "cuda":
            state[_CUDA] = torch.Generator(self._device).manual_seed(seed).get_state()
        return state

    def _live(self) -> dict[str, Tensor]:
        state = {_CPU: torch.get_rng_state()}
        if self._device.type == "cuda":
            state[_CUDA] = torch.cuda.get_rng_state(self._device)
        return state

    def _set(self, state: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(state[_CPU])
        if _CUDA in state:
            torch.cuda.set_rng_state(state[_CUDA], self._device)
