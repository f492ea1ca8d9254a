"""A federation whose messages take time, on a clock that moves only when someone waits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from flower_geo.compression import record_nbytes
from flower_geo.resilience import Exchange
from flower_geo.strategies import session
from flower_geo.strategies.links import TimedExchange
from tests.federation import MemoryGrid, Node, Tamper, sites
from tests.resilience.scripted import Clock

#: Seconds a site works at a message, and what a round trip costs beside bytes.
WORK, LATENCY = 30.0, 4.0
#: (site, kind, round) -> bytes a second up, down
Line = Callable[[str, str, int], tuple[float, float]]


class SlowGrid(MemoryGrid):
    """Replies arrive when work and both transfers are over.

    Attributes:
        arriving: message id -> when its replies are there.
        extra: (site, round) -> seconds its next reply takes more.
    """

    def __init__(
        self, nodes: Iterable[Node], clock: Clock, line: Line, tamper: Tamper | None = None
    ) -> None:
        super().__init__(nodes, tamper)
        self.clock, self.line = clock, line
        self.arriving: dict[str, float] = {}
        self.extra: dict[tuple[str, int], float] = {}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            (key,) = super().push_messages([message])
            ids.append(key)
            site, kind, group = self.served[-1]
            up, down = self.line(site, kind, int(group))
            seconds = LATENCY + WORK + _size(message) / down
            replies = self._replies[key]
            if replies:
                seconds += _size(replies[0]) / up
            for reply in replies:
                if reply.has_content():
                    reply.content.config_records["geo"]["at_work"] = WORK
                    metrics = reply.content.metric_records["metrics"]
                    if "seconds-total" in metrics:
                        metrics["seconds-total"] = WORK
            self.arriving[key] = self.clock() + seconds + self.extra.pop((site, int(group)), 0.0)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        there = [key for key in message_ids if self.arriving.get(key, 0.0) <= self.clock()]
        return super().pull_messages(there)


def _size(message: Message) -> int:
    if not message.has_content():
        return 0
    arrays = message.content.array_records.get("arrays")
    return 0 if arrays is None else record_nbytes(arrays)


def on_clock(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    """Let every session's exchange wait on ``clock``."""
    for name, kind in (("TimedExchange", TimedExchange), ("Exchange", Exchange)):
        made: Any = partial(kind, clock=clock, sleep=clock.sleep)
        monkeypatch.setattr(session, name, made)


def slow_federation(
    tmp_path: Path, count: int, clock: Clock, line: Line, tamper: Tamper | None = None, **node: Any
) -> SlowGrid:
    return SlowGrid(sites(count, tmp_path / "state", **node), clock, line, tamper)
