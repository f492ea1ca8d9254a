"""Who takes part, and what is let in.

``Membership`` knows the sites by name: node ids change whenever a SuperNode
restarts without an authentication key, the site does not.  ``Screen`` looks at
one reply by itself; what it refuses costs that reply, never the round.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.compression import Codec, unpack_blobs
from flower_geo.errors import CorruptPayload, ReplyRefused
from flower_geo.messages import Reply, Request

__all__ = ["Membership", "Screen", "SiteRecord"]

#: Rounds a failing site rests: doubled with every failure in a row, at most this.
MAX_REST = 8


@dataclass
class SiteRecord:
    """One institution, as the coordinator knows it.

    Attributes:
        name: the site's own name.
        node_id: the Flower node it answers at now; None while disconnected.
        held_version, held_hash: newest model version known to be at the site.
        accepted: newest round whose update of this site was folded in.
        consumed: training sequences the site had used up by then.
        answered, late, failed, refused: how its requests ended so far.
        failures_in_a_row, rest_until: back-off of a failing site.
    """

    name: str
    node_id: int | None = None
    held_version: int = -1
    held_hash: str = ""
    accepted: int = 0
    consumed: int = 0
    data: str = ""
    answered: int = 0
    late: int = 0
    failed: int = 0
    refused: int = 0
    failures_in_a_row: int = 0
    rest_until: int = 0

    def succeed(self) -> None:
        """Note a good reply."""
        self.answered += 1
        self.failures_in_a_row = self.rest_until = 0

    def fail(self, round: int) -> None:
        """Note a failure; from the second in a row on the site rests 1, 2, 4, 8 rounds."""
        self.failed += 1
        self.failures_in_a_row += 1
        if self.failures_in_a_row > 1:
            self.rest_until = round + min(2 ** (self.failures_in_a_row - 2), MAX_REST)


@dataclass
class Membership:
    """All sites ever greeted, by name."""

    sites: dict[str, SiteRecord] = field(default_factory=dict)
    #: Nodes that were greeted and turned away, with the reason.
    turned_away: dict[int, str] = field(default_factory=dict)
    _greeted: set[int] = field(default_factory=set)

    def unknown(self, nodes: Iterable[int]) -> list[int]:
        """Nodes that have not been greeted yet, in ascending order."""
        return sorted(set(nodes) - self._greeted)

    def greeting(self, node_id: int) -> None:
        """Note that a greeting is on its way to this node."""
        self._greeted.add(node_id)

    def forget(self, node_id: int) -> None:
        """Greet this node again when it is seen next."""
        self._greeted.discard(node_id)

    def welcome(self, node_id: int, reply: Reply) -> SiteRecord | None:
        """Enter the site that answered a greeting from ``node_id``.

        Returns:
            The same site's record under its earlier node when that one is
            replaced (a restarted SuperNode, or one started twice), else None.
        """
        record = self.sites.setdefault(reply.site, SiteRecord(reply.site))
        replaced = None
        if record.node_id is not None and record.node_id != node_id:
            replaced = SiteRecord(**asdict(record))
        record.node_id = node_id
        record.held_version, record.held_hash = reply.held_version, reply.held_hash
        record.data = reply.data
        return replaced

    def online(self, nodes: Iterable[int]) -> list[SiteRecord]:
        """Welcomed sites whose node is among ``nodes``, in the order of their names."""
        present = set(nodes)
        for record in self.sites.values():
            if record.node_id is not None and record.node_id not in present:
                record.node_id = None
        self._greeted &= present
        self.turned_away = {node: why for node, why in self.turned_away.items() if node in present}
        return sorted(
            (record for record in self.sites.values() if record.node_id is not None),
            key=lambda record: record.name,
        )

    def choose(self, nodes: Iterable[int], round: int, at_least: int) -> list[SiteRecord]:
        """Sites to ask in ``round``: connected and not resting.

        When resting sites are needed to reach ``at_least``, they are woken.
        """
        online = self.online(nodes)
        ready = [record for record in online if record.rest_until < round]
        return ready if len(ready) >= at_least else online

    def state(self) -> list[dict[str, Any]]:
        """JSON state; node ids are left out, since they do not outlive the server."""
        return [
            {key: value for key, value in asdict(self.sites[name]).items() if key != "node_id"}
            for name in sorted(self.sites)
        ]

    def restore(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Take over what :meth:`state` gave."""
        self.sites = {entry["name"]: SiteRecord(**entry) for entry in state}


class Screen:
    """Checks of one reply against what was asked and against what is usual.

    Args:
        max_norm_factor: an update whose L2 norm is more than this many times
            the running median is refused; 0 switches the check off.
        memory: accepted norms the median runs over.
    """

    #: Norms that must be known before one can be called unusual.
    MIN_HISTORY = 4

    def __init__(self, max_norm_factor: float = 10.0, memory: int = 64) -> None:
        self.max_norm_factor = max_norm_factor
        self.norms: deque[float] = deque(maxlen=memory)

    def check(self, request: Request, reply: Reply, base: Mapping[str, Tensor]) -> float:
        """Return the update's L2 norm, or raise ``ReplyRefused`` with the reason.

        One tensor is decoded at a time; ``base`` gives names and shapes.
        """
        echo = (reply.round, reply.version, reply.base_hash, reply.fingerprint)
        asked = (request.round, request.version, request.base_hash, request.fingerprint)
        if echo != asked:
            raise ReplyRefused(
                f"it answers round {reply.round} from version {reply.version}, "
                f"not round {request.round} from version {request.version}"
            )
        if reply.arrays is None or reply.kind == "none":
            raise ReplyRefused("it holds no update")
        for key in ("train-loss", "loss-last"):
            if not math.isfinite(reply.metrics.get(key, 0.0)):
                raise ReplyRefused(f"{key} is not finite")
        norm = self._norm(reply.arrays, reply.kind, base)
        usual = statistics.median(self.norms) if len(self.norms) >= self.MIN_HISTORY else None
        if self.max_norm_factor and usual and norm > self.max_norm_factor * usual:
            raise ReplyRefused(
                f"its norm {norm:.3g} is more than {self.max_norm_factor:g} times the usual "
                f"{usual:.3g}"
            )
        self.norms.append(norm)
        return norm

    @staticmethod
    def _norm(arrays: ArrayRecord, kind: str, base: Mapping[str, Tensor]) -> float:
        total = 0.0
        try:
            blobs = unpack_blobs(arrays, {name: tuple(t.shape) for name, t in base.items()})
            for name, blob in blobs.items():
                tensor = Codec.decode(blob, shape=tuple(base[name].shape))
                if kind == "weights":
                    tensor = base[name] - tensor
                squared = float(torch.sum(tensor.double() ** 2)) if tensor.numel() else 0.0
                if not math.isfinite(squared):
                    raise ReplyRefused(f"tensor {name} is not finite")
                total += squared
        except CorruptPayload as error:
            raise ReplyRefused(str(error)) from None
        return math.sqrt(total)
