"""One round: ask the sites, take replies as they come, screen, spool, and know when to stop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flower_geo.errors import ReplyRefused, StateLocked
from flower_geo.messages import Reply, Request
from flower_geo.resilience.evaluation import Evaluation, Measured
from flower_geo.resilience.exchange import QUERY, TRAIN, Exchange, Incoming, Open
from flower_geo.resilience.intake import Base, Intake, Part, whole_base
from flower_geo.resilience.membership import Membership, SiteRecord
from flower_geo.resilience.policy import Emit, RoundOutcome, RoundPolicy
from flower_geo.resilience.reception import Reception
from flower_geo.resilience.replies import NeedLimit, payload_bytes, site_line
from flower_geo.resilience.screening import Screen
from flower_geo.resilience.spool import Spool

__all__ = ["RoundEngine"]

logger = logging.getLogger(__name__)

#: Rounds after which an unanswered request is not looked for any more.
FORGET_AFTER = 16
#: Seconds between two looks at who came and went while a round waits.
LOOK_AROUND = 2.0


@dataclass
class _Round:
    """A round under way: what was asked, from which base, and what came so far."""

    base: Base
    attempt: int
    request_for: Callable[[SiteRecord], Request]
    outcome: RoundOutcome
    have: set[str] = field(default_factory=set)
    asked: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    #: Sites at work for somebody else, and when to ask them again.
    busy: dict[str, float] = field(default_factory=dict)
    told_busy: set[str] = field(default_factory=set)

    @property
    def number(self) -> int:
        """The round's number."""
        return self.base.round


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
        part: what of a base a reply is an update of.
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
        part: Part = whole_base,
    ) -> None:
        super().__init__(exchange, membership, policy, emit, check_hello)
        self.intake = Intake(exchange, membership, screen, spool, part)
        self.spool = spool
        self._needs = NeedLimit()
        exchange.patience = policy.deadline
        exchange.tell = self._network

    # -- a round --------------------------------------------------------------

    def gather(
        self,
        round: int,
        attempt: int,
        hello: Callable[[], Request],
        request_for: Callable[[SiteRecord], Request],
        base: Mapping[str, Tensor],
        base_of: Callable[[int], Mapping[str, Tensor] | None] = lambda version: None,
        convene: Callable[[int, int, Sequence[str]], None] = lambda round, attempt, sites: None,
    ) -> RoundOutcome:
        """Ask the sites and collect good replies until the policy is content.

        Args:
            round: number of the round.
            attempt: number of the try.
            hello: makes a greeting for nodes that appear meanwhile.
            request_for: makes the request for one site.
            base: the weights the sites train from.
            base_of: weights of an earlier version, for late replies.
            convene: told the round, the try and the sites to be asked, before any is.
        """
        nodes = self.exchange.nodes()
        self.greet(hello, nodes)
        self._settle_contests()
        oldest = round - max(FORGET_AFTER, self.policy.max_staleness)
        self.intake.forget_before(oldest)
        self._needs.forget_before(oldest)
        outcome = RoundOutcome(self.intake.spooled(round, request_for), 0, attempt)
        now = _Round(Base(round, base, base_of), attempt, request_for, outcome)
        now.have = {reply.meta.site for reply in outcome.replies}
        now.asked = set(now.have)
        self._returned.clear()
        ready = [
            record
            for record in self.membership.choose(nodes, round, self.policy.min_sites)
            if not self._on_its_way(record, round)
        ]
        there = len(now.have | {record.name for record in ready})
        count = self.policy.to_ask(there)
        drawn = self.membership.draw(ready, count, round, self.policy.seed, now.have)
        convene(round, attempt, sorted(now.have | {record.name for record in drawn}))
        for record in drawn:
            self._begin(record, now)
        for record in self.membership.online(nodes):
            # Asked in an earlier try, and worth waiting for though it rests by now.
            if self.policy.oldest and self.intake.training(record, round):
                self._begin(record, now)
        outcome.asked = len(now.asked)
        needed = min(outcome.asked, self.policy.needed(there))
        in_time = self._collect(now, self.policy.quorum_of(max(needed, 1)), hello)
        for site in sorted(now.missing - now.have):
            self._miss(self.membership.sites[site], now, in_time)
        outcome.replies = self.spool.replies(round)
        return outcome

    def _on_its_way(self, record: SiteRecord, round: int) -> bool:
        """Whether an earlier round's reply of the site is out and still worth waiting for."""
        open_since = self.intake.training(record, round - self.policy.oldest)
        return open_since and not self.intake.training(record, round)

    def _begin(self, record: SiteRecord, now: _Round) -> None:
        """Ask a site, unless its reply to this round is there or still to be had."""
        if record.name in now.have:
            return
        if not (self.policy.oldest and self.intake.training(record, now.number)):
            now.outcome.sent(record.name, self._ask(record, now.number, now.request_for(record)))
        record.last_asked = now.number
        now.asked.add(record.name)
        now.missing.add(record.name)

    def _collect(self, now: _Round, quorum: int, hello: Callable[[], Request]) -> bool:
        """Take replies until the policy is content; False when the deadline ended it."""
        clock = self.exchange.clock
        end = clock() + self.policy.deadline
        met = False
        while True:
            # Late replies of sites not asked this time come on top.
            if not met and len(now.have & now.asked) >= quorum:
                met, end = True, min(end, clock() + self.policy.grace)
                if not self.policy.grace:
                    return True
            if clock() >= end:
                return met
            until = min(end, clock() + LOOK_AROUND)
            for incoming in self.exchange.take(until, lambda open: self._wanted(open, now)):
                self._heard(incoming)
                site = incoming.request.site
                if self._dispatch(incoming, now):
                    now.have.add(site)
                over = not self.intake.training(self.membership.sites.get(site))
                if over and site not in now.busy:
                    now.missing.discard(site)
                self.emit(
                    "waiting", round=now.number, answered=sorted(now.have),
                    pending=sorted(now.missing),
                )  # fmt: skip
                if self._returned or (not met and len(now.have & now.asked) >= quorum):
                    break
            self._look_around(now, hello)
            if now.busy and not self.exchange.awaits(lambda open: self._wanted(open, now)):
                self.exchange.sleep(max(0.0, min(until - clock(), 1.0)))
            elif not self.exchange.awaits(lambda open: self._wanted(open, now)):
                return True

    def _look_around(self, now: _Round, hello: Callable[[], Request]) -> None:
        """Greet who came; ask again sites that came back and sites that were busy."""
        nodes = self.exchange.glance()
        if nodes is None:
            return
        self.greet(hello, nodes)
        self._settle_contests()
        due = {name for name, when in now.busy.items() if self.exchange.clock() >= when}
        for name in sorted(due | set(self._returned)):
            record = self.membership.sites[name]
            open_here = self.intake.training(record, now.number)
            if name in now.asked and record.node_id is not None and not open_here:
                self._begin(record, now)
            now.busy.pop(name, None)
        self._returned.clear()

    def _miss(self, record: SiteRecord, now: _Round, in_time: bool) -> None:
        """Note a site without a reply; one that let the deadline pass costs everybody time."""
        self.intake.miss(record, now.number)
        if not in_time:
            record.rest(now.number)
        self.emit(
            "site", round=now.number, attempt=now.attempt, site=record.name, status="missing",
            reason="no reply before the " + ("round ended" if in_time else "deadline"),
            bytes_down=now.outcome.down.get(record.name, 0),
        )  # fmt: skip

    def _wanted(self, request: Open, now: _Round) -> bool:
        """Whether the round waits for this request: for late ones only while it needs them."""
        staleness = now.number - request.round
        if request.kind != TRAIN:
            return False
        return staleness == 0 or (
            staleness <= self.policy.oldest and len(now.have) < self.policy.min_sites
        )

    def _network(self, detail: str) -> None:
        self.emit("fault", site="", what="network", detail=detail)
        logger.warning("%s", detail)

    def evaluate(self, round: int, request_for: Callable[[SiteRecord], Request]) -> list[Measured]:
        """Ask every connected site for its held-out figures; in site order.

        Sites that fail or do not answer within the deadline are left out.
        """
        asking = Evaluation(
            self.exchange, self.membership, self.emit, self._needs, round, request_for
        )
        return asking.run(self.policy.deadline)

    def _ask(self, record: SiteRecord, round: int, request: Request) -> int:
        self.intake.asked(record.name, request)
        node = record.node_id
        if node is None or not self.exchange.push(
            node, record.name, round, TRAIN, request.to_records()
        ):
            if node is not None:
                self.membership.forget(node)
            self.emit("fault", round=round, site=record.name, what="not sent", detail="node left")
            return 0
        return payload_bytes(request.arrays)

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
        if not self.intake.expects(opened):
            return False
        line: dict[str, Any] = {
            "round": now.number, "attempt": now.attempt, "site": opened.site,
            "node": str(opened.node_id), "bytes_down": now.outcome.down.get(opened.site, 0),
        }  # fmt: skip
        self.intake.arrived(record, opened)
        try:
            if incoming.records is None:
                if incoming.node_gone and self.intake.training(record, opened.round):
                    return False  # asked again at its new node meanwhile
                return self._failed(record, incoming.failure, line)
            reply = Reply.from_records(incoming.records)
            if reply.site != opened.site:
                raise ReplyRefused(f"site {opened.site} answers as {reply.site}")
            record.note_held(reply)
            if reply.status == "need":
                if opened.round != now.number:
                    self.intake.miss(record, opened.round)  # that round has no use for it
                    return False
                self._needs.count(opened)
                again = self._ask(record, now.number, now.request_for(record))
                now.outcome.sent(record.name, again)
                return False
            if reply.error == StateLocked.__name__ and opened.round == now.number:
                return self._busy(record, reply.detail, now)
            if reply.status != "done":
                return self._failed(record, reply.detail or "it gave no reason", line)
            line |= site_line(reply)
            now.outcome.bytes_up += int(line["bytes_up"])
            norm, dropped = self.intake.admit(opened, reply, record, self.policy, now.base)
        except ReplyRefused as error:
            self._refused(record, str(error), line)
            return False
        if opened.round < now.number:
            line["staleness"] = now.number - opened.round
        if dropped:
            # Not folded, so the next request names an earlier generation to go on
            # from: the site's residual and its place in the data roll back.
            record.late += 1
            line["reason"] = f"dropped: {dropped}"
        elif norm is not None:
            now.outcome.norms[opened.site] = norm
        status = "late" if dropped else "accepted"
        self.emit("site", status=status, update_norm=norm, **line)
        return not dropped

    def _busy(self, record: SiteRecord, detail: str, now: _Round) -> bool:
        """The site is at work for an earlier life of this server, or stands twice on its folder."""
        now.busy[record.name] = self.exchange.clock() + LOOK_AROUND
        if record.name not in now.told_busy:
            now.told_busy.add(record.name)
            self.emit("fault", round=now.number, site=record.name, what="busy", detail=detail)
        return False

    def _failed(self, record: SiteRecord, reason: str, line: dict[str, Any]) -> bool:
        record.fail(line["round"])
        self.emit("site", status="failed", reason=reason, **line)
        logger.warning("site %s failed in round %d: %s", record.name, line["round"], reason)
        return False

    def _refused(self, record: SiteRecord, reason: str, line: dict[str, Any]) -> None:
        self.emit("site", status="refused", reason=reason, **line)
        logger.warning("reply of site %s refused: %s", record.name, reason)
        if record.refuse(line["round"]):
            why = (
                f"{record.refusals_in_a_row} of its updates were refused in a row; it is not "
                f"asked before round {record.quarantined_until + 1}"
            )
            self.emit(
                "fault", round=line["round"], site=record.name, what="quarantined", detail=why
            )
            logger.warning("site %s: %s", record.name, why)
