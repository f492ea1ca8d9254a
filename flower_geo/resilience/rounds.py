"""One round: ask the sites, take replies as they come, screen, spool, and know when to stop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from flower_geo.compression import unpack_blobs
from flower_geo.errors import ReplyRefused
from flower_geo.messages import Reply, Request
from flower_geo.resilience.admission import Membership, Screen, SiteRecord
from flower_geo.resilience.exchange import EVALUATE, QUERY, TRAIN, Exchange, Incoming, Open
from flower_geo.resilience.policy import Emit, RoundOutcome, RoundPolicy
from flower_geo.resilience.reception import Reception
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


@dataclass
class _Round:
    """A round under way: what was asked, from which base, and what came so far."""

    number: int
    attempt: int
    base: Mapping[str, Tensor]
    base_of: Callable[[int], Mapping[str, Tensor] | None]
    request_for: Callable[[SiteRecord], Request]
    outcome: RoundOutcome


class RoundEngine(Reception):
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
        super().__init__(exchange, membership, policy, emit, check_hello)
        self.screen = screen
        self.spool = spool
        self._requests: dict[tuple[str, int], Request] = {}
        self._sent: dict[tuple[str, int, str], int] = {}

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
        self._forget_before(round - max(FORGET_AFTER, self.policy.max_staleness))
        outcome = RoundOutcome(self._spooled(round, request_for), 0, attempt)
        under_way = _Round(round, attempt, base, base_of, request_for, outcome)
        have = {reply.meta.site for reply in outcome.replies}
        asked, missing = set(have), set()
        for record in self.membership.choose(nodes, round, self.policy.min_sites):
            if record.name in have:
                continue
            if self.policy.max_staleness and self._training(record):
                if not self._training(record, round):
                    continue  # an earlier round's reply is still worth waiting for
            else:
                outcome.sent(record.name, self._ask(record, round, request_for(record)))
            asked.add(record.name)
            missing.add(record.name)
        outcome.asked = len(asked)
        quorum = self.policy.quorum_of(max(outcome.asked, 1))
        if len(have) < quorum:
            until = self.exchange.clock() + self.policy.deadline
            for incoming in self.exchange.take(until, lambda open: self._wanted(open, round, have)):
                site = incoming.request.site
                if self._dispatch(incoming, under_way):
                    have.add(site)
                if not self._training(self.membership.sites.get(site)):
                    missing.discard(site)
                self.emit("waiting", round=round, answered=sorted(have), pending=sorted(missing))
                # Late replies of sites not asked this time come on top.
                if len(have & asked) >= quorum:
                    break
        for site in sorted(missing - have):
            self.membership.sites[site].late += 1
            self.emit(
                "site", round=round, attempt=attempt, site=site, status="missing",
                reason="no reply before the round ended", bytes_down=outcome.down.get(site, 0),
            )  # fmt: skip
        outcome.replies = self.spool.replies(round)
        return outcome

    def _wanted(self, request: Open, round: int, have: set[str]) -> bool:
        """Whether the round waits for this request: for late ones only while it needs them."""
        staleness = round - request.round
        if request.kind != TRAIN:
            return False
        return staleness == 0 or (
            staleness <= self.policy.max_staleness and len(have) < self.policy.min_sites
        )

    def evaluate(
        self, round: int, request_for: Callable[[SiteRecord], Request]
    ) -> list[tuple[str, float, float]]:
        """Ask every connected site for its held-out loss; ``(site, loss, tokens)`` in order.

        Sites that fail or do not answer within the deadline are left out.
        """
        self.exchange.drop(lambda request: request.kind == EVALUATE)
        asked: dict[str, str] = {}
        for record in self.membership.online(self.exchange.nodes()):
            asked[record.name] = self._ask_evaluation(record, round, request_for)
        measured: list[tuple[str, float, float]] = []
        until = self.exchange.clock() + self.policy.deadline
        for incoming in self.exchange.take(until, lambda request: request.kind == EVALUATE):
            if incoming.request.kind != EVALUATE or incoming.request.round != round:
                continue
            if incoming.records is None:
                logger.warning(
                    "site %s did not evaluate: %s", incoming.request.site, incoming.failure
                )
                continue
            record = self.membership.sites[incoming.request.site]
            try:
                reply = Reply.from_records(incoming.records)
                if reply.site != record.name:
                    raise ReplyRefused(f"it answers as {reply.site}")
                if reply.status == "need":
                    self._count_needs(incoming.request)
                elif reply.status == "done" and reply.base_hash != asked[record.name]:
                    raise ReplyRefused("it measured another version")
            except ReplyRefused as error:
                logger.warning("site %s: evaluation refused: %s", record.name, error)
                continue
            self._note_held(record, reply)
            if reply.status == "need" and record.node_id is not None:
                self._ask_evaluation(record, round, request_for)
            elif reply.status == "done" and math.isfinite(
                reply.metrics.get("loss-before", math.nan)
            ):
                tokens = reply.metrics.get("eval-tokens", 0.0)
                measured.append((record.name, reply.metrics["loss-before"], tokens))
            else:
                logger.warning("site %s cannot evaluate: %s", record.name, reply.detail)
        return sorted(measured)

    def _ask_evaluation(
        self, record: SiteRecord, round: int, request_for: Callable[[SiteRecord], Request]
    ) -> str:
        assert record.node_id is not None
        request = request_for(record)
        if self.exchange.push(
            record.node_id, record.name, round, EVALUATE, request.to_records()
        ) and (down := payload_bytes(request.arrays)):
            self.emit("evaluation", round=round, site=record.name, bytes_down=down)
        return request.base_hash

    def _forget_before(self, round: int) -> None:
        """Stop looking for replies that are too old to be of any use."""
        self.exchange.drop(lambda request: request.kind == TRAIN and request.round < round)
        self._requests = {key: kept for key, kept in self._requests.items() if key[1] >= round}
        self._sent = {key: count for key, count in self._sent.items() if key[1] >= round}

    def _training(self, record: SiteRecord | None, round: int | None = None) -> bool:
        """Whether a train request (of ``round``) is open at the site's present node."""
        if record is None or record.node_id is None:
            return False
        return any(
            request.node_id == record.node_id
            and request.kind == TRAIN
            and round in (None, request.round)
            for request in self.exchange.open.values()
        )

    def _ask(self, record: SiteRecord, round: int, request: Request) -> int:
        # Kept for the checks of the reply; the payload need not outlive the push.
        self._requests[record.name, round] = replace(request, arrays=None)
        node = record.node_id
        if node is None or not self.exchange.push(
            node, record.name, round, TRAIN, request.to_records()
        ):
            if node is not None:
                self.membership.forget(node)
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
            if record is None:
                fits = False
            elif reply.meta.staleness:
                # Nothing newer of this site may have been folded since.
                fits = reply.meta.round > record.accepted
            else:
                request = request_for(record)
                key = (request.base_hash, request.fingerprint)
                fits = (reply.meta.base_hash, reply.meta.fingerprint) == key
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
        if (opened.site, opened.round) not in self._requests:
            return False  # a second answer to what was asked twice
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
            self._note_held(record, reply)
            if reply.status == "need":
                if opened.round != now.number:
                    return False
                self._count_needs(opened)
                again = self._ask(record, now.number, now.request_for(record))
                now.outcome.sent(record.name, again)
                return False
            if reply.status != "done":
                return self._failed(record, reply.detail or "it gave no reason", line)
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

    @staticmethod
    def _note_held(record: SiteRecord, reply: Reply) -> None:
        """Believe what a site says it holds; a refusal says nothing, a late reply what was."""
        newer = reply.status == "done" and reply.held_version >= record.held_version
        if newer or reply.status == "need":
            record.held_version, record.held_hash = reply.held_version, reply.held_hash

    def _failed(self, record: SiteRecord, reason: str, line: dict[str, Any]) -> bool:
        record.fail(line["round"])
        self.emit("site", status="failed", reason=reason, **line)
        logger.warning("site %s failed in round %d: %s", record.name, line["round"], reason)
        return False

    def _admit(self, opened: Open, reply: Reply, record: SiteRecord, now: _Round) -> bool:
        """Screen and spool; False for a late reply that is not folded."""
        request = self._requests[opened.site, opened.round]
        staleness = now.number - opened.round
        trained_from: Mapping[str, Tensor] | None = now.base
        if staleness:
            # What was folded or asked since then started from the same data, so
            # folding both would count that data twice.
            folds = (
                staleness <= self.policy.max_staleness
                and request.accepted == record.accepted
                and not self._training(record)
                and not self.spool.holds(now.number, opened.site)
            )
            if not folds:
                trained_from = None
            elif reply.kind == "weights":
                trained_from = now.base_of(request.version)
        if trained_from is None:
            record.late += 1
            return False
        weight = weight_of(reply, self.policy.weight_by)
        if weight <= 0:
            raise ReplyRefused("it trained on nothing")
        norm = self.screen.check(request, reply, trained_from)
        assert reply.arrays is not None
        shapes = {name: tuple(tensor.shape) for name, tensor in trained_from.items()}
        blobs, kind = unpack_blobs(reply.arrays, shapes), reply.kind
        if staleness and kind == "weights":
            blobs, kind = as_differences(blobs, trained_from), "delta"
        meta = ReplyMeta(
            site=reply.site, round=opened.round, version=reply.version, base_hash=reply.base_hash,
            kind=kind, weight=weight, staleness=staleness, fingerprint=reply.fingerprint,
            payload_hash=payload_hash(blobs), metrics=reply.metrics,
        )  # fmt: skip
        self.spool.put(now.number, meta, blobs)
        del self._requests[opened.site, opened.round]
        now.outcome.norms[reply.site] = norm
        record.succeed()
        return True
