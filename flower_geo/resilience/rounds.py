"""One round: ask the sites, take replies as they come, screen, spool, and know when to stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flower_geo.compression import record_blobs
from flower_geo.errors import NotEnoughSites, ReplyRefused
from flower_geo.messages import Reply, Request
from flower_geo.resilience.admission import Membership, Screen, SiteRecord
from flower_geo.resilience.exchange import Exchange, Incoming, Open
from flower_geo.resilience.policy import Emit, RoundOutcome, RoundPolicy
from flower_geo.resilience.replies import (
    as_differences,
    payload_bytes,
    payload_hash,
    site_line,
    weight_of,
)
from flower_geo.resilience.spool import ReplyMeta, Spool, SpooledReply

__all__ = ["RoundEngine"]

logger = logging.getLogger(__name__)

#: Times a site may say within a round that it lacks the base: once for what the
#: coordinator did not know, once more for a payload spoilt on the way.
MAX_NEEDS = 3
#: Rounds after which an unanswered request is not looked for any more.
FORGET_AFTER = 16
TRAIN, EVALUATE, QUERY = "train", "evaluate", "query"


@dataclass
class _Round:
    """A round under way: what was asked, from which base, and what came so far."""

    number: int
    attempt: int
    base: Mapping[str, Tensor]
    base_of: Callable[[int], Mapping[str, Tensor] | None]
    request_for: Callable[[SiteRecord], Request]
    outcome: RoundOutcome


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
            round: number of the round.
            attempt: number of the try.
            hello: makes a greeting for nodes that appear meanwhile.
            request_for: makes the request for one site.
            base: the weights the sites train from.
            base_of: weights of an earlier version, for late replies.
        """
        nodes = self.exchange.nodes()
        self.greet(hello, nodes)
        self._forget_before(round - FORGET_AFTER)
        outcome = RoundOutcome(self._spooled(round, request_for), 0, attempt)
        under_way = _Round(round, attempt, base, base_of, request_for, outcome)
        have = {reply.meta.site for reply in outcome.replies}
        chosen = [
            record
            for record in self.membership.choose(nodes, round, self.policy.min_sites)
            if record.name not in have
            and not (self.policy.max_staleness and self._training(record))
        ]
        for record in chosen:
            outcome.sent(record.name, self._ask(record, round, request_for(record)))
        outcome.asked = len(chosen) + len(have)
        quorum = self.policy.quorum_of(max(outcome.asked, 1))
        missing = {record.name for record in chosen}
        if len(have) < quorum:
            until = self.exchange.clock() + self.policy.deadline
            for incoming in self.exchange.take(until, lambda request: _is_train(request, round)):
                site = incoming.request.site
                if self._dispatch(incoming, under_way):
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
                reason="no reply before the round ended", bytes_down=outcome.down.get(site, 0),
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
            elif reply.status == "done" and math.isfinite(
                reply.metrics.get("loss-before", math.nan)
            ):
                tokens = reply.metrics.get("eval-tokens", 0.0)
                measured.append((record.name, reply.metrics["loss-before"], tokens))
            else:
                logger.warning("site %s cannot evaluate: %s", record.name, reply.detail)
        return sorted(measured)

    def _forget_before(self, round: int) -> None:
        """Stop looking for replies that are too old to be of any use."""
        self.exchange.drop(lambda request: request.kind == TRAIN and request.round < round)
        self._requests = {key: kept for key, kept in self._requests.items() if key[1] >= round}

    def _training(self, record: SiteRecord | None) -> bool:
        if record is None or record.node_id is None:
            return False
        return any(
            request.node_id == record.node_id and request.kind == TRAIN
            for request in self.exchange.open.values()
        )

    def _ask(self, record: SiteRecord, round: int, request: Request) -> int:
        assert record.node_id is not None
        # Kept for the checks of the reply; the payload need not outlive the push.
        self._requests[record.name, round] = replace(request, arrays=None)
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

    def _dispatch(self, incoming: Incoming, now: _Round | None = None) -> bool:
        """Handle one incoming message; True when it added a reply to the round."""
        opened = incoming.request
        if opened.kind == QUERY:
            self._welcome(incoming)
            return False
        record = self.membership.sites.get(opened.site)
        if opened.kind != TRAIN or record is None or now is None:
            return False
        line: dict[str, Any] = {
            "round": now.number, "attempt": now.attempt, "site": opened.site,
            "node": str(opened.node_id), "bytes_down": now.outcome.down.get(opened.site, 0),
        }  # fmt: skip
        try:
            if incoming.records is None:
                return self._failed(record, incoming.failure, line)
            reply = Reply.from_records(incoming.records)
            if reply.site != opened.site:
                raise ReplyRefused(f"site {opened.site} answers as {reply.site}")
            record.held_version, record.held_hash = reply.held_version, reply.held_hash
            if reply.status == "need" and opened.round == now.number:
                self._count_needs(opened)
                again = self._ask(record, now.number, now.request_for(record))
                now.outcome.sent(record.name, again)
                return False
            if reply.status != "done":
                return self._failed(record, reply.detail or "it lacks the base", line)
            line |= site_line(reply)
            now.outcome.bytes_up += int(line["bytes_up"])
            accepted = self._admit(opened, reply, record, now)
        except ReplyRefused as error:
            record.refused += 1
            record.fail(now.number)
            self.emit("site", status="refused", reason=str(error), **line)
            logger.warning("reply of site %s refused: %s", opened.site, error)
            return False
        if opened.round < now.number:
            line["staleness"] = now.number - opened.round
        status = "accepted" if accepted else "late"
        self.emit("site", status=status, update_norm=now.outcome.norms.get(opened.site), **line)
        return accepted

    def _failed(self, record: SiteRecord, reason: str, line: dict[str, Any]) -> bool:
        record.fail(line["round"])
        self.emit("site", status="failed", reason=reason, **line)
        logger.warning("site %s failed in round %d: %s", record.name, line["round"], reason)
        return False

    def _admit(self, opened: Open, reply: Reply, record: SiteRecord, now: _Round) -> bool:
        """Screen and spool; False for a late reply that is not folded."""
        request = self._requests.pop((opened.site, opened.round), None)
        if request is None:
            raise ReplyRefused("it answers no open request")
        staleness = now.number - opened.round
        trained_from: Mapping[str, Tensor] | None = now.base
        if staleness:
            # A newer request already under way starts from the same data, so
            # folding both would count that data twice.
            folds = staleness <= self.policy.max_staleness and not self._training(record)
            trained_from = now.base_of(reply.version) if folds else None
        if trained_from is None:
            record.late += 1
            return False
        norm = self.screen.check(request, reply, trained_from)
        assert reply.arrays is not None
        blobs, kind = record_blobs(reply.arrays), reply.kind
        if staleness and kind == "weights":
            blobs, kind = as_differences(blobs, trained_from), "delta"
        meta = ReplyMeta(
            site=reply.site, round=opened.round, version=reply.version, base_hash=reply.base_hash,
            kind=kind, weight=weight_of(reply, self.policy.weight_by), staleness=staleness,
            fingerprint=reply.fingerprint, payload_hash=payload_hash(blobs), metrics=reply.metrics,
        )  # fmt: skip
        if meta.weight <= 0:
            raise ReplyRefused("it trained on nothing")
        self.spool.put(now.number, meta, blobs)
        now.outcome.norms[reply.site] = norm
        record.succeed()
        return True


def _is_train(request: Open, round: int) -> bool:
    return request.kind == TRAIN and request.round == round
