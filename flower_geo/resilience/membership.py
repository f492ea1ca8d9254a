"""Who takes part: sites by name, how they fared, and whom a round asks.

Node ids change whenever a SuperNode restarts without an authentication key; the
site does not.  A site that fails, or does not answer, rests for a while that
doubles; one whose updates are refused again and again is put in quarantine.  A
good reply ends both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flower_geo.messages import Reply

__all__ = ["Membership", "SiteRecord"]

#: Rounds a failing site rests: doubled with every failure in a row, at most this.
MAX_REST = 8
#: Updates refused in a row that put a site in quarantine, and for how many rounds:
#: doubled with every refusal after it came back, at most so many.
QUARANTINE_AFTER = 3
QUARANTINE, MAX_QUARANTINE = 16, 64


@dataclass
class SiteRecord:
    """One institution, as the coordinator knows it.

    Attributes:
        name: the site's own name.
        node_id: the Flower node it answers at now; None while disconnected.
        held_version, held_hash: newest model version known to be at the site.
        accepted: newest round whose update of this site was folded in.
        consumed: training sequences the site had used up by then.
        answered, late, failed, refused, missed: how its requests ended so far, each in
            one way: folded, come too late, reported an error, screened out, no reply.
        failures_in_a_row: failures, refusals and deadlines missed since it last was folded.
        refusals_in_a_row: of these, updates that were screened out.
        rest_until: last round it is not asked in.
        quarantined_until: last round of its quarantine; it is not woken before.
        last_asked: newest round it was asked in.
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
    missed: int = 0
    failures_in_a_row: int = 0
    refusals_in_a_row: int = 0
    rest_until: int = 0
    quarantined_until: int = 0
    last_asked: int = 0

    def succeed(self) -> None:
        """Note a good reply: the way back from rest and quarantine."""
        self.answered += 1
        self.failures_in_a_row = self.refusals_in_a_row = 0
        self.rest_until = self.quarantined_until = 0

    def fail(self, round: int) -> None:
        """Note a failure."""
        self.failed += 1
        self.rest(round)

    def rest(self, round: int) -> None:
        """One more in a row went wrong: from the second on it rests 1, 2, 4, 8 rounds."""
        self.failures_in_a_row += 1
        if self.failures_in_a_row > 1:
            self.rest_until = round + min(2 ** (self.failures_in_a_row - 2), MAX_REST)

    def refuse(self, round: int) -> bool:
        """Note an update that was screened out; True when that put the site in quarantine."""
        self.refused += 1
        self.refusals_in_a_row += 1
        self.rest(round)
        over = self.refusals_in_a_row - QUARANTINE_AFTER
        if over < 0:
            return False
        self.quarantined_until = round + min(QUARANTINE * 2 ** min(over, 8), MAX_QUARANTINE)
        return True

    def note_held(self, reply: Reply) -> None:
        """Believe what a site says it holds; a refusal says nothing, a late reply what was."""
        newer = reply.status == "done" and reply.held_version >= self.held_version
        if newer or reply.status == "need":
            self.held_version, self.held_hash = reply.held_version, reply.held_hash


@dataclass
class Membership:
    """All sites ever greeted, by name.

    Attributes:
        sites: the records.
        turned_away: nodes that were greeted and may not take part, with the reason.
        doubles: nodes that gave the name of a site that answers at another node.
    """

    sites: dict[str, SiteRecord] = field(default_factory=dict)
    turned_away: dict[int, str] = field(default_factory=dict)
    doubles: dict[int, str] = field(default_factory=dict)
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
            replaced (a restarted SuperNode), else None.
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
        for node, name in list(self.doubles.items()):
            if node not in present or self.sites[name].node_id is None:
                # The one it doubled is gone: greeted again, it takes its place.
                del self.doubles[node]
                self.forget(node)
        return sorted(
            (record for record in self.sites.values() if record.node_id is not None),
            key=lambda record: record.name,
        )

    def choose(self, nodes: Iterable[int], round: int, at_least: int) -> list[SiteRecord]:
        """Sites that may be asked in ``round``: connected, not resting, not in quarantine.

        When resting sites are needed to reach ``at_least``, they are woken; those in
        quarantine are not.
        """
        online = [each for each in self.online(nodes) if each.quarantined_until < round]
        ready = [record for record in online if record.rest_until < round]
        return ready if len(ready) >= at_least else online

    @staticmethod
    def draw(
        ready: Sequence[SiteRecord], count: int, round: int, seed: int, have: Collection[str] = ()
    ) -> list[SiteRecord]:
        """So many of ``ready``, in site order: those asked longest ago, ties by lot.

        The lot depends on seed, round and name only, so that a coordinator that
        resumes draws the same sites.

        Args:
            ready: sites that may be asked.
            count: how many are wanted, those in ``have`` included.
            round: the round.
            seed: the run's seed.
            have: sites whose reply is there already; they are always among them.
        """
        there = [record for record in ready if record.name in have]
        others = [record for record in ready if record.name not in have]

        def lot(record: SiteRecord) -> tuple[int, bytes]:
            text = f"{seed}/{round}/{record.name}"
            return record.last_asked, hashlib.sha256(text.encode()).digest()

        drawn = sorted(others, key=lot)[: max(count - len(have), 0)]
        return sorted(there + drawn, key=lambda record: record.name)

    def in_quarantine(self, round: int) -> list[str]:
        """Names of the sites in quarantine in ``round``."""
        return sorted(each.name for each in self.sites.values() if each.quarantined_until >= round)

    def state(self) -> list[dict[str, Any]]:
        """JSON state; node ids are left out, since they do not outlive the server."""
        return [
            {key: value for key, value in asdict(self.sites[name]).items() if key != "node_id"}
            for name in sorted(self.sites)
        ]

    def restore(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Take over what :meth:`state` gave."""
        self.sites = {entry["name"]: SiteRecord(**entry) for entry in state}
