"""Sites come and go: greetings, who is welcome, and when a run can begin.

A node that gives the name of a site which is connected at another node is either
that site's new SuperNode, whose old one Flower has not yet missed, or a second
one started by mistake.  The old node is asked: when it answers, the new one is
told and turned away; when it is gone, or says nothing while it has no work, the
new one takes over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from flower_geo.errors import NotEnoughSites, ReplyRefused, StateLocked
from flower_geo.messages import NOTICE, Reply, Request
from flower_geo.resilience.exchange import EVALUATE, QUERY, TRAIN, Exchange, Incoming
from flower_geo.resilience.membership import Membership, SiteRecord
from flower_geo.resilience.network import Backoff
from flower_geo.resilience.policy import Emit, RoundPolicy

__all__ = ["Reception"]

logger = logging.getLogger(__name__)

#: Seconds after which a node without work that does not answer counts as gone: a
#: ClientApp needs several to start, and Flower misses a node after 40 to 64.
TAKEOVER_AFTER = 30.0


@dataclass(frozen=True)
class _Contest:
    """Two nodes with one site's name, the older one asked whether it is still there."""

    incumbent: int
    challenger: int
    hello: Reply
    since: float


class Reception:
    """Greets nodes and enters the sites behind them.

    Args:
        exchange: open requests over Flower's grid.
        membership: sites by name.
        policy: how many sites a run begins with.
        emit: takes events for the metrics log.
        check_hello: raises ``ReplyRefused`` for a site that may not take part.
    """

    def __init__(
        self,
        exchange: Exchange,
        membership: Membership,
        policy: RoundPolicy,
        emit: Emit,
        check_hello: Callable[[Reply], None],
    ) -> None:
        self.exchange = exchange
        self.membership = membership
        self.policy = policy
        self.emit = emit
        self.check_hello = check_hello
        self._hello: Callable[[], Request] | None = None
        self._contests: list[_Contest] = []
        #: Known sites that came (back) to a node since it was last looked.
        self._returned: list[str] = []
        #: Nodes that could not answer a greeting: when to try again.
        self._later: dict[int, tuple[float, Backoff]] = {}

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
                self._heard(incoming)
                if incoming.request.kind == QUERY:
                    self._welcome(incoming)
            self._settle_contests()
            if self.membership.turned_away and self.policy.strict_start and not committed:
                raise NotEnoughSites(next(iter(self.membership.turned_away.values())))
            online = self.membership.online(self.exchange.nodes())
            greeting = any(request.kind == QUERY for request in self.exchange.open.values())
            if len(online) >= self.policy.min_sites and not greeting:
                return online
            if clock() >= limit and not greeting:
                raise NotEnoughSites(self._too_few(len(online)))
            if clock() >= limit + self.policy.deadline:
                if len(online) >= self.policy.min_sites:
                    return online  # a greeting that nobody answers holds up no run
                raise NotEnoughSites(self._too_few(len(online)))
            if not greeting:
                self.exchange.sleep(self.exchange.poll)

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
        self._hello = hello
        now = self.exchange.clock()
        self.membership.online(nodes)  # who left makes room for who gave the same name
        self._later = {node: kept for node, kept in self._later.items() if node in nodes}
        for node_id in self.membership.unknown(nodes):
            if node_id in self._later and now < self._later[node_id][0]:
                continue
            if self.exchange.push(node_id, "", 0, QUERY, hello().to_records()):
                self.membership.greeting(node_id)

    def _welcome(self, incoming: Incoming) -> None:
        node_id = incoming.request.node_id
        try:
            if incoming.records is None:
                self._greet_later(node_id)
                self.emit("fault", site="", what="no greeting", detail=incoming.failure)
                logger.warning("node %d did not answer a greeting: %s", node_id, incoming.failure)
                return
            reply = Reply.from_records(incoming.records)
            if reply.error == StateLocked.__name__:
                # Still at work for an earlier life of this server; asked again.
                self._greet_later(node_id)
                self.emit("fault", site=reply.site, what="busy", detail=reply.detail)
                return
            if reply.status != "done":
                raise ReplyRefused(f"site {reply.site}: {reply.detail}")
            self.check_hello(reply)
        except ReplyRefused as error:
            self.membership.turned_away[node_id] = str(error)
            self.emit("fault", site="", what="turned away", detail=str(error))
            logger.error("node %d is turned away: %s", node_id, error)
            return
        record = self.membership.sites.get(reply.site)
        if record is None or record.node_id in (None, node_id):
            self._enter(node_id, reply)
        elif reply.follows == str(record.node_id):
            # Only somebody at the site itself knows the old node's id.
            self._enter(node_id, reply)
        elif record.node_id in (self.exchange.glance() or {record.node_id}):
            self._contest(record.node_id, node_id, reply)
        else:
            self._enter(node_id, reply)

    def _greet_later(self, node_id: int) -> None:
        self.membership.forget(node_id)
        _, backoff = self._later.get(node_id, (0.0, Backoff(1.0, 60.0)))
        self._later[node_id] = (self.exchange.clock() + backoff.next(), backoff)

    def _enter(self, node_id: int, reply: Reply) -> None:
        record = self.membership.sites.get(reply.site)
        if record is not None and record.node_id != node_id:
            self._returned.append(reply.site)
        self._later.pop(node_id, None)
        replaced = self.membership.welcome(node_id, reply)
        if replaced is not None:
            self.emit(
                "fault", site=reply.site, what="new node",
                detail=f"node {node_id} takes over from node {replaced.node_id}",
            )  # fmt: skip

    # -- one name, two nodes --------------------------------------------------

    def _contest(self, incumbent: int, challenger: int, hello: Reply) -> None:
        assert self._hello is not None
        now = self.exchange.clock()
        self._contests.append(_Contest(incumbent, challenger, hello, now))
        if not self.exchange.push(incumbent, hello.site, 0, QUERY, self._hello().to_records()):
            self._settle(self._contests[-1], alive=False)

    def _heard(self, incoming: Incoming) -> None:
        """Any word of a node shows that it is there, but for Flower's that it is gone."""
        for contest in list(self._contests):
            if contest.incumbent == incoming.request.node_id:
                self._settle(contest, alive=not incoming.node_gone)

    def _settle_contests(self) -> None:
        """Decide contests whose old node left, or keeps silent without work."""
        present, now = self.exchange.glance() if self._contests else None, self.exchange.clock()
        if present is None:
            return
        for contest in list(self._contests):
            at_work = self.exchange.awaits(
                lambda request, node=contest.incumbent: (  # type: ignore[misc]
                    request.node_id == node and request.kind in (TRAIN, EVALUATE)
                )
            )
            if contest.challenger not in present:
                self._close(contest)
            elif contest.incumbent not in present or (
                not at_work and now - contest.since >= TAKEOVER_AFTER
            ):
                self._settle(contest, alive=False)

    def _close(self, contest: _Contest) -> None:
        self._contests.remove(contest)
        if not any(each.incumbent == contest.incumbent for each in self._contests):
            node = contest.incumbent
            self.exchange.drop(lambda request: request.node_id == node and request.kind == QUERY)

    def _settle(self, contest: _Contest, *, alive: bool) -> None:
        self._close(contest)
        if not alive:
            self._enter(contest.challenger, contest.hello)
            return
        site, node = contest.hello.site, contest.challenger
        why = (
            f"site {site} was started twice: node {contest.incumbent} answers under that name, so "
            f"node {node} is not asked; stop one of the two, or give it another node-config site="
        )
        self.membership.doubles[node] = site
        self.emit("fault", site=site, what="started twice", detail=why)
        logger.error("%s", why)
        assert self._hello is not None
        told = replace(self._hello(), config={NOTICE: why}, arrays=None)
        # What it says to that is of no interest.
        if self.exchange.push(node, site, 0, QUERY, told.to_records()):
            self.exchange.drop(lambda request: request.node_id == node and request.kind == QUERY)
