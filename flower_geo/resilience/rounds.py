"""One round: ask the sites, take replies as they come, screen, spool, and know when to stop."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.compression import Codec, codec, record_blobs, record_nbytes
from flower_geo.errors import NotEnoughSites, ReplyRefused
from flower_geo.messages import Reply, Request
from flower_geo.resilience.admission import Membership, Screen, SiteRecord
from flower_geo.resilience.exchange import Exchange, Incoming, Open
from flower_geo.resilience.spool import ReplyMeta, Spool, SpooledReply

__all__ = ["RoundEngine", "RoundOutcome", "RoundPolicy"]

logger = logging.getLogger(__name__)

#: Times a site may say within a round that it lacks the base: once for what the
#: coordinator did not know, once more for a payload spoilt on the way.
MAX_NEEDS = 3
TRAIN, EVALUATE, QUERY = "train", "evaluate", "query"


class Emit(Protocol):
    """Takes one event of the metrics log."""

    def __call__(self, event: str, /, **values: Any) -> None:
        """Record ``event``."""


@dataclass(frozen=True)
class RoundPolicy:
    """When a round ends and what it needs.

    Attributes:
        quorum_of: good replies, out of so many asked, that end the round early.
        deadline: seconds after which the round ends with what there is.
        min_sites: good replies without which it is not committed.
        max_staleness: rounds a late reply may be behind and still be folded.
        wait_for_sites: seconds to wait for ``min_sites`` to connect.
        strict_start: bad input at any site stops a run that has not begun.
        weight_by: ``tokens``, ``examples`` or ``equal``.
    """

    quorum_of: Callable[[int], int]
    deadline: float = 3600.0
    min_sites: int = 1
    max_staleness: int = 0
    wait_for_sites: float = 120.0
    strict_start: bool = True
    weight_by: str = "tokens"


@dataclass
class RoundOutcome:
    """What a round brought.

    Attributes:
        replies: accepted replies, in site order.
        asked: sites asked, those with a reply already spooled included.
        bytes_up, bytes_down: payload bytes received and sent.
        norms: update norm by site.
    """

    replies: list[SpooledReply]
    asked: int
    bytes_up: int = 0
    bytes_down: int = 0
    norms: dict[str, float] = field(default_factory=dict)


class RoundEngine:
    """Runs rounds over an exchange; knows nothing of how a model is updated.

    Args:
        exchange: open requests over Flower's grid.
        membership: sites by name.
        screen: checks of a reply.
        spool: accepted replies on disk.
        policy: when a round ends.
        emit: takes events for the metrics log.
        check_hello: raises ``ReplyRefused`` for a site that may not take part
            (another tokenizer, say).
    """

    def __init__(
        self,
        exchange: Exchange,
        membership: Membership,
        screen: Screen,
        spool: Spool,
        policy: RoundPolicy,
        emit: Emit,
        check_hello: Callable[[Reply], None] = lambda reply: None,
    ) -> None:
        self.exchange = exchange
        self.membership = membership
        self.screen = screen
        self.spool = spool
        self.policy = policy
        self.emit = emit
        self.check_hello = check_hello
        self._requests: dict[tuple[str, int], Request] = {}
        self._sent: dict[tuple[str, int, str], int] = {}

    # -- sites come and go ----------------------------------------------------

    def assemble(self, hello: Callable[[], Request], committed: bool) -> list[SiteRecord]:
        """Greet every connected node until ``min_sites`` are welcome.

        Raises:
            NotEnoughSites: too few connected in ``wait_for_sites`` seconds, or
                (before the first commit, under ``strict_start``) a site's
                input is bad.
        """
        clock = self.exchange.clock
        limit = clock() + self.policy.wait_for_sites
        while True:
            nodes = self.exchange.nodes()
            self.greet(hello, nodes)
            # Greetings may take long where a site tokenises first; sites that
            # answered are kept waiting only while others are still at it.
            until = clock() + 1.0
            for incoming in self.exchange.take(until, lambda request: request.kind == QUERY):
                self._dispatch(incoming)
            if self.membership.turned_away and self.policy.strict_start and not committed:
                raise NotEnoughSites(next(iter(self.membership.turned_away.values())))
            online = self.membership.online(self.exchange.nodes())
            greeting = any(request.kind == QUERY for request in self.exchange.open.values())
            if len(online) >= self.policy.min_sites and not greeting:
                return online
            if clock() >= limit and not greeting:
                raise NotEnoughSites(self._too_few(len(online)))
            if clock() >= limit + self.policy.deadline:
                raise NotEnoughSites(self._too_few(len(online)))

    def _too_few(self, online: int) -> str:
        reasons = "; ".join(self.membership.turned_away.values())
        return (
            f"{online} of min-sites={self.policy.min_sites} sites are ready after "
            f"{self.policy.wait_for_sites:g} s"
            + (f" ({reasons})" if reasons else "")
            + "; start flower-supernode at the sites, or lower min-sites, or raise wait-for-sites"
        )

    def greet(self, hello: Callable[[], Request], nodes: set[int]) -> None:
        """Send a greeting to every node not greeted yet."""
        for node_id in self.membership.unknown(nodes):
            if self.exchange.push(node_id, "", 0, QUERY, hello().to_records()):
                self.membership.greeting(node_id)

    def _welcome(self, incoming: Incoming) -> None:
        node_id = incoming.request.node_id
        try:
            if incoming.records is None:
                self.membership.forget(node_id)
                self.emit("fault", site="", what="no greeting", detail=incoming.failure)
                logger.warning("node %d did not answer a greeting: %s", node_id, incoming.failure)
                return
            reply = Reply.from_records(incoming.records)
            if reply.status != "done":
                raise ReplyRefused(f"site {reply.site}: {reply.detail}")
            self.check_hello(reply)
        except ReplyRefused as error:
            self.membership.turned_away[node_id] = str(error)
            self.emit("fault", site="", what="turned away", detail=str(error))
            logger.error("node %d is turned away: %s", node_id, error)
            return
        replaced = self.membership.welcome(node_id, reply)
        if replaced is not None:
            self.emit(
                "fault", site=reply.site, what="new node",
                detail=f"node {node_id} takes over from node {replaced.node_id}",
            )  # fmt: skip

    # -- a round --------------------------------------------------------------

    def gather(
        self,
        round: int,
        attempt: int,
        hello: Callable[[], Request],
        request_for: Callable[[SiteRecord], Request],
        base: Mapping[str, Tensor],
        base_of: Callable[[int], Mapping[str, Tensor] | None] = lambda version: None,
    ) -> RoundOutcome:
        """Ask the sites and collect good replies until the policy is content.

        Args:
            round, attempt: numbers of the round and of its try.
            hello: makes a greeting for nodes that appear meanwhile.
            request_for: makes the request for one site.
            base: the weights the sites train from.
            base_of: weights of an earlier version, for late replies.
        """
        nodes = self.exchange.nodes()
        self.greet(hello, nodes)
        outcome = RoundOutcome(self._spooled(round, request_for), 0)
        have = {reply.meta.site for reply in outcome.replies}
        wanted = self.policy.quorum_of
        chosen = [
            record
            for record in self.membership.choose(nodes, round, self.policy.min_sites)
            if record.name not in have
            and not (self.policy.max_staleness and self._training(record))
        ]
        for record in chosen:
            outcome.bytes_down += self._ask(record, round, request_for(record))
        outcome.asked = len(chosen) + len(have)
        quorum = wanted(max(outcome.asked, 1))

        until = self.exchange.clock() + self.policy.deadline
        missing = {record.name for record in chosen}
        if len(have) < quorum:
            for incoming in self.exchange.take(until, lambda r: r.round == round and r.kind == TRAIN):
                site = incoming.request.site
                if self._dispatch(incoming, round, attempt, base, base_of, request_for, outcome):
                    have.add(site)
                if not self._training(self.membership.sites.get(site)):
                    missing.discard(site)
                self.emit("waiting", round=round, answered=sorted(have), pending=sorted(missing))
                if len(have) >= quorum:
                    break
        for site in sorted(missing - have):
            self.membership.sites[site].late += 1
            self.emit(
                "site", round=round, attempt=attempt, site=site, status="missing",
                reason="no reply before the round ended",
            )  # fmt: skip
        outcome.replies = self.spool.replies(round)
        return outcome

    def evaluate(
        self, round: int, request_for: Callable[[SiteRecord], Request]
    ) -> list[tuple[str, float, float]]:
        """Ask every connected site for its held-out loss; ``(site, loss, tokens)`` in order.

        Sites that fail or do not answer within the deadline are left out.
        """
        for record in self.membership.online(self.exchange.nodes()):
            assert record.node_id is not None
            self.exchange.push(
                record.node_id, record.name, round, EVALUATE, request_for(record).to_records()
            )
        measured: list[tuple[str, float, float]] = []
        until = self.exchange.clock() + self.policy.deadline
        for incoming in self.exchange.take(until, lambda request: request.kind == EVALUATE):
            if incoming.request.kind != EVALUATE or incoming.records is None:
                continue
            record = self.membership.sites[incoming.request.site]
            try:
                reply = Reply.from_records(incoming.records)
                if reply.status == "need":
                    self._count_needs(incoming.request)
            except ReplyRefused as error:
                logger.warning("site %s: evaluation refused: %s", record.name, error)
                continue
            record.held_version, record.held_hash = reply.held_version, reply.held_hash
            if reply.status == "need" and record.node_id is not None:
                self.exchange.push(
                    record.node_id, record.name, round, EVALUATE, request_for(record).to_records()
                )
            elif reply.status == "done" and math.isfinite(reply.metrics.get("loss-before", math.nan)):
                tokens = reply.metrics.get("eval-tokens", 0.0)
                measured.append((record.name, reply.metrics["loss-before"], tokens))
            else:
                logger.warning("site %s cannot evaluate: %s", record.name, reply.detail)
        return sorted(measured)

    def _training(self, record: SiteRecord | None) -> bool:
        if record is None or record.node_id is None:
            return False
        return any(
            request.node_id == record.node_id and request.kind == TRAIN
            for request in self.exchange.open.values()
        )

    def _ask(self, record: SiteRecord, round: int, request: Request) -> int:
        assert record.node_id is not None
        self._requests[record.name, round] = request
        if not self.exchange.push(record.node_id, record.name, round, TRAIN, request.to_records()):
            self.membership.forget(record.node_id)
            self.emit("fault", round=round, site=record.name, what="not sent", detail="node left")
            return 0
        return payload_bytes(request.arrays)

    def _count_needs(self, opened: Open) -> None:
        """Refuse a site that says again and again that it lacks the base."""
        key = (opened.site, opened.round, opened.kind)
        self._sent[key] = self._sent.get(key, 0) + 1
        if self._sent[key] > MAX_NEEDS:
            raise ReplyRefused(f"it asked {MAX_NEEDS} times for the base of round {opened.round}")

    def _spooled(
        self, round: int, request_for: Callable[[SiteRecord], Request]
    ) -> list[SpooledReply]:
        """Replies an earlier life of the server spooled for this very round."""
        good = []
        for reply in self.spool.replies(round):
            record = self.membership.sites.get(reply.meta.site)
            request = request_for(record) if record is not None else None
            fits = request is not None and (
                (reply.meta.base_hash, reply.meta.fingerprint)
                == (request.base_hash, request.fingerprint)
                or 0 < reply.meta.staleness
            )
            if fits:
                good.append(reply)
            else:
                self.spool.drop(round, reply.meta.site)
        return good

    # -- one reply ------------------------------------------------------------

    def _dispatch(
        self,
        incoming: Incoming,
        round: int = 0,
        attempt: int = 1,
        base: Mapping[str, Tensor] | None = None,
        base_of: Callable[[int], Mapping[str, Tensor] | None] = lambda version: None,
        request_for: Callable[[SiteRecord], Request] | None = None,
        outcome: RoundOutcome | None = None,
    ) -> bool:
        """Handle one incoming message; True when it added a reply to the round."""
        opened = incoming.request
        if opened.kind == QUERY:
            self._welcome(incoming)
            return False
        record = self.membership.sites.get(opened.site)
        if opened.kind != TRAIN or record is None or outcome is None or base is None:
            return False
        line: dict[str, Any] = {"round": round, "attempt": attempt, "site": opened.site,
                                "node": str(opened.node_id)}  # fmt: skip
        if incoming.records is None:
            record.fail(round)
            self.emit("site", status="failed", reason=incoming.failure, **line)
            logger.warning("site %s failed in round %d: %s", opened.site, round, incoming.failure)
            return False
        try:
            reply = Reply.from_records(incoming.records)
            if reply.site != opened.site:
                raise ReplyRefused(f"site {opened.site} answers as {reply.site}")
            record.held_version, record.held_hash = reply.held_version, reply.held_hash
            if reply.status == "need" and request_for is not None and opened.round == round:
                self._count_needs(opened)
                outcome.bytes_down += self._ask(record, round, request_for(record))
                return False
            if reply.status != "done":
                record.fail(round)
                self.emit("site", status="failed", reason=reply.detail, **line)
                logger.warning("site %s cannot train: %s", opened.site, reply.detail)
                return False
            line |= site_line(reply)
            outcome.bytes_up += int(line["bytes_up"])
            accepted = self._admit(opened, reply, record, round, base, base_of, outcome)
        except ReplyRefused as error:
            record.refused += 1
            record.fail(round)
            self.emit("site", status="refused", reason=str(error), **line)
            logger.warning("reply of site %s refused: %s", opened.site, error)
            return False
        status = "accepted" if accepted else "late"
        if opened.round < round:
            line["staleness"] = round - opened.round
        self.emit("site", status=status, update_norm=outcome.norms.get(opened.site), **line)
        return accepted

    def _admit(
        self,
        opened: Open,
        reply: Reply,
        record: SiteRecord,
        round: int,
        base: Mapping[str, Tensor],
        base_of: Callable[[int], Mapping[str, Tensor] | None],
        outcome: RoundOutcome,
    ) -> bool:
        """Screen and spool; False for a late reply that is not folded."""
        request = self._requests.pop((opened.site, opened.round), None)
        if request is None:
            raise ReplyRefused("it answers no open request")
        staleness = round - opened.round
        trained_from: Mapping[str, Tensor] | None = base
        if staleness:
            # A newer request already under way starts from the same data, so
            # folding both would count that data twice.
            if staleness > self.policy.max_staleness or self._training(record):
                record.late += 1
                return False
            trained_from = base_of(reply.version)
            if trained_from is None:
                record.late += 1
                return False
        norm = self.screen.check(request, reply, trained_from or base)
        assert reply.arrays is not None
        blobs, kind = record_blobs(reply.arrays), reply.kind
        if staleness and kind == "weights" and trained_from is not None:
            blobs = as_differences(blobs, trained_from)
            kind = "delta"
        meta = ReplyMeta(
            site=reply.site, round=opened.round, version=reply.version, base_hash=reply.base_hash,
            kind=kind, weight=weight_of(reply, self.policy.weight_by), staleness=staleness,
            fingerprint=reply.fingerprint, payload_hash=payload_hash(blobs), metrics=reply.metrics,
        )  # fmt: skip
        if meta.weight <= 0:
            raise ReplyRefused("it trained on nothing")
        self.spool.put(round, meta, blobs)
        outcome.norms[reply.site] = norm
        record.succeed()
        return True


def weight_of(reply: Reply, weight_by: str) -> float:
    """Weight of a reply in the mean: its tokens, its examples, or one."""
    return 1.0 if weight_by == "equal" else reply.metrics.get(weight_by, 0.0)


def payload_bytes(arrays: ArrayRecord | None) -> int:
    """Payload bytes of an optional record."""
    return 0 if arrays is None else record_nbytes(arrays)


def payload_hash(blobs: Mapping[str, bytes]) -> str:
    """Hash of encoded tensors, by name."""
    digest = hashlib.sha256()
    for name in sorted(blobs):
        digest.update(name.encode() + b"\0" + hashlib.sha256(blobs[name]).digest())
    return digest.hexdigest()


def as_differences(
    blobs: Mapping[str, bytes], trained_from: Mapping[str, Tensor]
) -> dict[str, bytes]:
    """Turn a reply of weights into base minus local, losslessly coded."""
    plain = codec("fp32")
    return {
        name: plain.encode(trained_from[name] - Codec.decode(blob), name=name)
        for name, blob in blobs.items()
    }


def site_line(reply: Reply) -> dict[str, Any]:
    """A reply's numbers as they stand in a ``site`` event."""
    metrics = reply.metrics
    names = {
        "train_loss": "train-loss", "loss_before": "loss-before", "loss_after": "loss-after",
        "tokens": "tokens", "steps": "steps", "seconds": "seconds",
    }  # fmt: skip
    line: dict[str, Any] = {key: metrics.get(name) for key, name in names.items()}
    line |= {"bytes_up": payload_bytes(reply.arrays), "codec_up": reply.codec, "data": reply.data}
    return line
