"""Sites come and go: greetings, who is welcome, and when a run can begin."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flower_geo.errors import NotEnoughSites, ReplyRefused, StateLocked
from flower_geo.messages import Reply, Request
from flower_geo.resilience.admission import Membership, SiteRecord
from flower_geo.resilience.exchange import QUERY, Exchange, Incoming
from flower_geo.resilience.policy import Emit, RoundPolicy

__all__ = ["Reception"]

logger = logging.getLogger(__name__)


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
                if incoming.request.kind == QUERY:
                    self._welcome(incoming)
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
            if reply.error == StateLocked.__name__:
                # Still at work for an earlier life of this server; asked again.
                self.membership.forget(node_id)
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
        replaced = self.membership.welcome(node_id, reply)
        if replaced is not None:
            self.emit(
                "fault", site=reply.site, what="new node",
                detail=f"node {node_id} takes over from node {replaced.node_id}",
            )  # fmt: skip
