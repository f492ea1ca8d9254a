"""An engine whose state shows which calls it has run, in which order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flower_geo.calls import Answer, Call
from flower_geo.cloud.group import Reply


class Counting:
    """Takes a step for a site with each of its ``step`` calls; all share one tally.

    Attributes:
        tally: sum over the steps run, each weighted by its place.
        ran: (site, step) of every step, also of ones that were undone.
    """

    def __init__(self) -> None:
        self.tally = 0.0
        self.ran: list[tuple[str, int]] = []
        self.away: set[str] = set()
        self._done: dict[str, int] = {}
        self._queue: deque[tuple[str, Call, Reply]] = deque()

    @property
    def boundary(self) -> int | None:
        steps = {step for site, step in self._done.items() if site not in self.away}
        return steps.pop() if len(steps) == 1 else None

    def begin(self, sites: Sequence[str]) -> None:
        self._done = dict.fromkeys(sites, 0)

    def submit(self, site: str, call: Call, answer: Reply) -> None:
        self._queue.append((site, call, answer))

    def work(self, timeout: float) -> bool:
        if not self._queue:
            return False
        site, call, answer = self._queue.popleft()
        if call.kind == "step":
            self.ran.append((site, call.step))
            self._done[site] = call.step
            self.tally = 2 * self.tally + call.step + len(site)
        answer(Answer({"tally": self.tally}))
        return True

    def admit(self, site: str) -> None:
        pass

    def leave(self, site: str) -> None:
        self.away.add(site)

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        return {"tally": torch.tensor([self.tally])}, {"done": dict(self._done)}

    def load_state_dict(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.tally = float(tensors["tally"])
        self._done = {str(site): int(step) for site, step in state["done"].items()}
        self.away.clear()
        self._queue.clear()
