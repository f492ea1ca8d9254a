"""The held-out loss of a version that is no round's base: asked of every connected site."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from flower_geo.errors import ReplyRefused
from flower_geo.messages import Reply, Request
from flower_geo.resilience.exchange import EVALUATE, Exchange, Incoming
from flower_geo.resilience.membership import Membership, SiteRecord
from flower_geo.resilience.policy import Emit
from flower_geo.resilience.replies import NeedLimit, payload_bytes

__all__ = ["Evaluation", "Measured"]

logger = logging.getLogger(__name__)


class Measured(NamedTuple):
    """A site's held-out figures: loss a token, tokens it was taken on, and all it said."""

    site: str
    loss: float
    tokens: float
    metrics: Mapping[str, float]


class Evaluation:
    """One evaluation: a question to each site, and the answers that count.

    Args:
        exchange: open requests over Flower's grid.
        membership: sites by name.
        emit: takes events for the metrics log.
        needs: how often a site may lack the base.
        round: commits the version stands for.
        request_for: makes the request for one site.
    """

    def __init__(
        self,
        exchange: Exchange,
        membership: Membership,
        emit: Emit,
        needs: NeedLimit,
        round: int,
        request_for: Callable[[SiteRecord], Request],
    ) -> None:
        self.exchange = exchange
        self.membership = membership
        self.emit = emit
        self.needs = needs
        self.round = round
        self.request_for = request_for
        self._asked: dict[str, str] = {}

    def run(self, deadline: float) -> list[Measured]:
        """What was measured, in site order.

        Sites that fail or do not answer within ``deadline`` seconds are left out.
        """
        self.exchange.drop(lambda request: request.kind == EVALUATE)
        for record in self.membership.online(self.exchange.nodes()):
            self._ask(record)
        measured: list[Measured] = []
        until = self.exchange.clock() + deadline
        for incoming in self.exchange.take(until, lambda request: request.kind == EVALUATE):
            request = incoming.request
            if request.kind != EVALUATE or request.round != self.round:
                continue
            try:
                found = self._read(incoming)
            except ReplyRefused as error:
                logger.warning("site %s: evaluation refused: %s", request.site, error)
                continue
            if found is not None:
                measured.append(found)
        return sorted(measured, key=lambda each: each.site)

    def _ask(self, record: SiteRecord) -> None:
        assert record.node_id is not None
        request = self.request_for(record)
        if self.exchange.push(
            record.node_id, record.name, self.round, EVALUATE, request.to_records()
        ) and (down := payload_bytes(request.arrays)):
            self.emit("evaluation", round=self.round, site=record.name, bytes_down=down)
        self._asked[record.name] = request.base_hash

    def _read(self, incoming: Incoming) -> Measured | None:
        site = incoming.request.site
        if incoming.records is None:
            logger.warning("site %s did not evaluate: %s", site, incoming.failure)
            return None
        record = self.membership.sites[site]
        reply = Reply.from_records(incoming.records)
        if reply.site != record.name:
            raise ReplyRefused(f"it answers as {reply.site}")
        if reply.status == "need":
            self.needs.count(incoming.request)
        elif reply.status == "done" and reply.base_hash != self._asked[record.name]:
            raise ReplyRefused("it measured another version")
        record.note_held(reply)
        if reply.status == "need" and record.node_id is not None:
            self._ask(record)
            return None
        loss = reply.metrics.get("loss-before", math.nan)
        if reply.status == "done" and math.isfinite(loss):
            tokens = reply.metrics.get("eval-tokens", 0.0)
            return Measured(site, loss, tokens, reply.metrics)
        logger.warning("site %s cannot evaluate: %s", site, reply.detail)
        return None
