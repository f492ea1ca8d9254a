"""One reply: whether it still counts, whether it is good, and its way to the spool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.compression import unpack_blobs
from flower_geo.errors import ReplyRefused
from flower_geo.messages import Reply, Request
from flower_geo.resilience.exchange import TRAIN, Exchange, Open
from flower_geo.resilience.membership import Membership, SiteRecord
from flower_geo.resilience.policy import RoundPolicy
from flower_geo.resilience.replies import as_differences, payload_hash, weight_of
from flower_geo.resilience.screening import Screen
from flower_geo.resilience.spool import ReplyMeta, Spool, SpooledReply

__all__ = ["Base", "Intake", "Part", "whole_base"]

#: The part of a base that a reply to a round must match in names and shapes, given the
#: reply's tensors; raises ``ReplyRefused`` where there is none.
Part = Callable[[int, Mapping[str, Tensor], ArrayRecord], Mapping[str, Tensor]]


def whole_base(round: int, base: Mapping[str, Tensor], arrays: ArrayRecord) -> Mapping[str, Tensor]:
    """The part of strategies whose sites send every tensor."""
    return base


@dataclass(frozen=True)
class Base:
    """What replies are judged against.

    Attributes:
        round: the round under way.
        weights: what its sites train from.
        of: weights of an earlier version, or None when they are not kept any more.
    """

    round: int
    weights: Mapping[str, Tensor]
    of: Callable[[int], Mapping[str, Tensor] | None]


class Intake:
    """What was asked of whom, and the replies let in.

    Args:
        exchange: open requests over Flower's grid.
        membership: sites by name.
        screen: checks of a reply.
        spool: accepted replies on disk.
        part: what of a base a reply is an update of.

    Attributes:
        missed: (site, round) of requests that count as missed; a reply may still come.
    """

    def __init__(
        self,
        exchange: Exchange,
        membership: Membership,
        screen: Screen,
        spool: Spool,
        part: Part = whole_base,
    ) -> None:
        self.exchange = exchange
        self.membership = membership
        self.screen = screen
        self.spool = spool
        self.part = part
        self.missed: set[tuple[str, int]] = set()
        self._requests: dict[tuple[str, int], Request] = {}
        #: Spooled replies that this life's history knows already.
        self._counted: set[tuple[int, str]] = set()

    def asked(self, site: str, request: Request) -> None:
        """Keep a request for the checks of its reply; the payload need not outlive the push."""
        self._requests[site, request.round] = replace(request, arrays=None)

    def expects(self, opened: Open) -> bool:
        """Whether a reply is still wanted; not a second answer to what was asked twice."""
        return (opened.site, opened.round) in self._requests

    def training(self, record: SiteRecord | None, since: int = 0) -> bool:
        """Whether a train request of round ``since`` or later is open at the site's node."""
        if record is None or record.node_id is None:
            return False
        return any(
            request.node_id == record.node_id and request.kind == TRAIN and request.round >= since
            for request in self.exchange.open.values()
        )

    def forget_before(self, round: int) -> None:
        """Stop looking for replies that are too old to be of any use."""
        self.exchange.drop(lambda request: request.kind == TRAIN and request.round < round)
        self._requests = {key: kept for key, kept in self._requests.items() if key[1] >= round}
        self.missed = {key for key in self.missed if key[1] >= round}
        self._counted = {key for key in self._counted if key[0] >= round}

    def miss(self, record: SiteRecord, round: int) -> None:
        """Note that the round ended without the site's reply."""
        if (record.name, round) not in self.missed:
            self.missed.add((record.name, round))
            record.missed += 1

    def arrived(self, record: SiteRecord, opened: Open) -> None:
        """Take back a miss: each request ends in one way only."""
        if (opened.site, opened.round) in self.missed:
            self.missed.discard((opened.site, opened.round))
            record.missed -= 1

    def spooled(
        self, round: int, request_for: Callable[[SiteRecord], Request]
    ) -> list[SpooledReply]:
        """Replies on disk for this very round, an earlier life's included; the rest is dropped."""
        good = []
        for reply in self.spool.replies(round):
            record = self.membership.sites.get(reply.meta.site)
            if record is None or not self._fits(reply.meta, record, request_for):
                self.spool.drop(round, reply.meta.site)
                continue
            good.append(reply)
            if (round, reply.meta.site) not in self._counted:
                # Screened by an earlier life, whose history went with it.
                self._counted.add((round, reply.meta.site))
                self.screen.remember(reply.meta.norm, reply.meta.metrics.get("train-loss"))
                record.succeed()
        return good

    @staticmethod
    def _fits(
        meta: ReplyMeta, record: SiteRecord, request_for: Callable[[SiteRecord], Request]
    ) -> bool:
        if meta.staleness:
            # Nothing newer of this site may have been folded since.
            return meta.round > record.accepted
        request = request_for(record)
        return (meta.base_hash, meta.fingerprint) == (request.base_hash, request.fingerprint)

    def admit(
        self, opened: Open, reply: Reply, record: SiteRecord, policy: RoundPolicy, base: Base
    ) -> tuple[float | None, str]:
        """Screen and spool a reply for folding in the round under way.

        Returns:
            The update's norm and "", or None and why a late reply is dropped.

        Raises:
            ReplyRefused: it did not pass the screen.
            StateError: the spool cannot be written.
        """
        request = self._requests[opened.site, opened.round]
        staleness = base.round - opened.round
        trained_from: Mapping[str, Tensor] | None = base.weights
        if staleness:
            if why := self._too_late(staleness, request, record, policy, base.round):
                return None, why
            if reply.kind == "weights":
                trained_from = base.of(request.version)
        if trained_from is None:
            return None, f"version {request.version}, which it began with, is not kept any more"
        weight = weight_of(reply, policy.weight_by)
        if weight <= 0:
            raise ReplyRefused("it trained on nothing")
        if reply.arrays is not None:
            trained_from = self.part(opened.round, trained_from, reply.arrays)
        norm = self.screen.check(request, reply, trained_from)
        assert reply.arrays is not None
        shapes = {name: tuple(tensor.shape) for name, tensor in trained_from.items()}
        blobs, kind = unpack_blobs(reply.arrays, shapes), reply.kind
        if staleness and kind == "weights":
            blobs, kind = as_differences(blobs, trained_from), "delta"
        meta = ReplyMeta(
            site=reply.site, round=opened.round, version=reply.version, base_hash=reply.base_hash,
            kind=kind, weight=weight, staleness=staleness, discount=policy.discount(staleness),
            norm=norm, fingerprint=reply.fingerprint, payload_hash=payload_hash(blobs),
            metrics=reply.metrics,
        )  # fmt: skip
        self.spool.put(base.round, meta, blobs)
        del self._requests[opened.site, opened.round]
        self._counted.add((base.round, reply.site))
        record.succeed()
        return norm, ""

    def _too_late(
        self, staleness: int, request: Request, record: SiteRecord, policy: RoundPolicy, round: int
    ) -> str:
        """Why a late reply cannot be folded; "" when it can.

        What was folded or asked since then started from the same data, so folding
        both would count that data twice.
        """
        if policy.staleness_weight == "drop":
            return f"{staleness} rounds late (staleness-weight=drop)"
        if staleness > policy.max_staleness:
            return f"{staleness} rounds late (max-staleness={policy.max_staleness})"
        if request.accepted != record.accepted:
            return f"its update of round {record.accepted} was folded since it was asked"
        if self.training(record):
            return "the site was asked again since"
        if self.spool.holds(round, record.name):
            return "a newer update of the site is there"
        return ""
