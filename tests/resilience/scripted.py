"""A grid whose sites are functions, on a clock that only moves when someone waits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from torch import Tensor

from flower_geo.compression import codec, content_hash, pack
from flower_geo.errors import ConfigError
from flower_geo.messages import Reply, Request
from flower_geo.resilience import (
    Exchange,
    Membership,
    RoundEngine,
    RoundPolicy,
    Screen,
    SiteRecord,
    Spool,
)

BASE: dict[str, Tensor] = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.zeros(5)}
HASH = content_hash(BASE)


def delta(scale: float = 1.0, spec: str = "fp32") -> Any:
    return pack(
        {name: torch.full_like(tensor, scale) for name, tensor in BASE.items()}, codec(spec)
    )


class Clock:
    """Seconds since the test began."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.now += seconds


class FakeGrid(Grid):
    """Flower's grid with replies at chosen times.

    Attributes:
        node_ids: nodes that are connected.
        serve: called with every pushed message; gives (seconds, reply) pairs.
        refused: nodes the SuperLink takes no message for.
        pulled: ids asked for, to count looks.
    """

    def __init__(self, clock: Clock) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.clock = clock
        self.node_ids: list[int] = []
        self.serve: Callable[[Message], Iterable[tuple[float, Message]]] = lambda message: []
        self.refused: dict[int, Any] = {}
        self.pushed: list[Message] = []
        self._ids = itertools.count(1)
        self._due: list[tuple[float, str, Message]] = []

    def set_run(self, run: Any) -> None:
        """Nothing to set."""

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.node_ids)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids: list[str] = []
        for message in messages:
            node = message.metadata.dst_node_id
            if node in self.refused:
                return list(self.refused[node])
            message.metadata.__dict__["_message_id"] = f"m{next(self._ids)}"
            self.pushed.append(message)
            ids.append(message.metadata.message_id)
            for seconds, reply in self.serve(message):
                self._due.append((self.clock() + seconds, message.metadata.message_id, reply))
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        wanted = set(message_ids)
        ready = [d for d in self._due if d[0] <= self.clock() and d[1] in wanted]
        self._due = [d for d in self._due if d not in ready]
        return [reply for _, _, reply in sorted(ready, key=lambda d: d[0])]

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        raise NotImplementedError


Behaviour = Callable[["FakeSite", Request, str], Reply | Error | None]


def honest(site: FakeSite, request: Request, kind: str) -> Reply | Error | None:
    """What a site without faults answers."""
    done = Reply(
        status="done", site=site.name, round=request.round, version=request.version,
        base_hash=request.base_hash, fingerprint=request.fingerprint,
        held_version=request.version, held_hash=request.base_hash, data="text",
    )  # fmt: skip
    if kind == "query":
        return done
    if kind == "evaluate":
        return replace(done, metrics={"loss-before": 2.0, "eval-tokens": 10.0})
    metrics = {"tokens": 100.0, "examples": 10.0, "steps": 2.0, "train-loss": 3.0}
    return replace(done, kind="delta", metrics=metrics, arrays=delta())


@dataclass
class FakeSite:
    """A site behind one node."""

    name: str
    node: int
    seconds: float = 1.0
    behave: Behaviour = honest
    asked: list[tuple[str, int]] = field(default_factory=list)


class World:
    """An engine over fake sites.

    Attributes:
        events: what was emitted.
        told: (node, why) of sites that were told why they may not take part.
        version: what requests are made from.
    """

    def __init__(self, tmp_path: Path, *sites: FakeSite, **policy: Any) -> None:
        self.clock = Clock()
        self.grid = FakeGrid(self.clock)
        self.sites = {site.node: site for site in sites}
        self.grid.node_ids = list(self.sites)
        self.grid.serve = self._serve
        self.events: list[dict[str, Any]] = []
        self.told: list[tuple[int, str]] = []
        self.membership = Membership()
        self.screen = Screen()
        self.spool = Spool(tmp_path / "spool")
        quorum = policy.pop("quorum", "all")
        options: dict[str, Any] = {"deadline": 100.0, "wait_for_sites": 10.0} | policy
        self.engine = RoundEngine(
            Exchange(self.grid, 0.5, self.clock, self.clock.sleep), self.membership, self.screen,
            self.spool,
            RoundPolicy(quorum_of=lambda n: n if quorum == "all" else min(n, quorum), **options),
            self._emit,
        )  # fmt: skip
        self.version = 0

    def _emit(self, event: str, /, **values: Any) -> None:
        self.events.append({"event": event, **values})

    def _serve(self, message: Message) -> list[tuple[float, Message]]:
        site = self.sites[message.metadata.dst_node_id]
        kind = message.metadata.message_type
        try:
            request = Request.from_records(message.content)
        except ConfigError as error:
            self.told.append((site.node, str(error)))
            return []
        site.asked.append((kind, request.round))
        answer = site.behave(site, request, kind)
        if answer is None:
            return []
        content = answer if isinstance(answer, Error) else answer.to_records()
        return [(0.0 if kind == "query" else site.seconds, Message(content, reply_to=message))]

    def hello(self) -> Request:
        return Request("run", "uid", version=self.version, base_hash=HASH, fingerprint="f")

    def request(self, record: SiteRecord, round: int) -> Request:
        return replace(self.hello(), round=round, accepted=record.accepted)

    def assemble(self, committed: bool = False) -> list[str]:
        return [record.name for record in self.engine.assemble(self.hello, committed)]

    def gather(self, round: int, attempt: int = 1) -> list[str]:
        """Names of the sites whose replies the round has, with a * for late ones."""
        self.outcome = self.engine.gather(
            round, attempt, self.hello, lambda record: self.request(record, round), BASE,
            lambda version: BASE,
        )  # fmt: skip
        return [
            reply.meta.site + "*" * (reply.meta.staleness > 0) for reply in self.outcome.replies
        ]

    def commit(self, round: int) -> None:
        """What a session notes when a round is final."""
        for reply in self.spool.replies(round):
            self.membership.sites[reply.meta.site].accepted = reply.meta.round
        self.spool.clear(round)

    def seen(self, event: str, **values: Any) -> list[dict[str, Any]]:
        return [
            e for e in self.events
            if e["event"] == event and all(e.get(k) == v for k, v in values.items())
        ]  # fmt: skip


def error_reply(message: Message, code: int, reason: str, node: int) -> Message:
    """An error as the SuperLink makes it for a node that is gone."""
    reply = Message(Error(code, reason), reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = node
    return reply


def plain_records() -> RecordDict:
    return Request("run", "uid").to_records()


def sites(*seconds: float) -> list[FakeSite]:
    return [FakeSite("abcdefgh"[i], i + 1, s) for i, s in enumerate(seconds)]


def failing(site: FakeSite, request: Request, kind: str) -> Any:
    return honest(site, request, kind) if kind == "query" else Error(2, "boom")


def silent(site: FakeSite, request: Request, kind: str) -> Any:
    return honest(site, request, kind) if kind == "query" else None


def needing(times: int) -> Any:
    left = {"needs": times}

    def behave(site: FakeSite, request: Request, kind: str) -> Any:
        done = honest(site, request, kind)
        if kind == "query" or left["needs"] <= 0:
            return done
        left["needs"] -= 1
        none: Any = {"held_version": -1, "held_hash": "", "arrays": None}
        return replace(done, status="need", **none)  # type: ignore[type-var]

    return behave
