"""Every site's accepted rounds, trained again from what the run left on disk.

One process, without a fault, from the base weights and the accepted round that each
reply names.  The replies must come out as the very bytes that were folded, and over
all of them, sum decoded + the residual that lies at the site = sum given.
"""

from __future__ import annotations

import shutil
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from flower_geo.compression import Codec, codec, record_blobs
from flower_geo.config import TRAINING_KEYS, DiLoCoConfig
from flower_geo.messages import Request
from flower_geo.resilience import SiteRecord
from flower_geo.resilience.replies import payload_hash
from flower_geo.resilience.spool import SpooledReply
from flower_geo.site import work
from flower_geo.site.state import Generation, SiteState
from flower_geo.strategies.links import Links

__all__ = ["Version", "check_sites"]

State = dict[str, Tensor]
#: Hash and weights of a version, as all sites held it.
Version = tuple[str, Mapping[str, Tensor]]


@dataclass
class _Sums:
    """What a site was given to send and what of it arrived, since its residual began."""

    given: State = field(default_factory=dict)
    decoded: State = field(default_factory=dict)
    largest: float = 0.0
    count: int = 0

    def add(self, given: Mapping[str, Tensor], reply: SpooledReply) -> None:
        self.count += 1
        for name, tensor in given.items():
            arrived = Codec.decode(reply.blob(name)).double()
            self.given[name] = self.given.get(name, 0) + tensor.double()
            self.decoded[name] = self.decoded.get(name, 0) + arrived
            self.largest = max(self.largest, float(tensor.abs().max()))

    def gap(self, residual: Mapping[str, Tensor]) -> float:
        """The largest difference, in roundings to fp32 of the largest value."""
        worst = max(
            float((self.decoded[name] + residual[name].double() - given).abs().max())
            for name, given in self.given.items()
        )
        return worst / (max(self.largest, 1e-30) * 2.0**-24)


def check_sites(
    config: DiLoCoConfig, uid: str, replies: Mapping[int, list[SpooledReply]],
    versions: Mapping[int, Version], nodes: Mapping[str, Mapping[str, Any]],
    *, forgot: bool = False,
) -> tuple[list[str], int]:  # fmt: skip
    """Train again what was folded.

    Args:
        config: of the run.
        uid: of the run folder.
        replies: what was folded, by the round it was folded in.
        versions: what the sites trained from.
        nodes: node-config by site, as the run had it.
        forgot: a site's state was damaged, so that it may have begun a residual anew.

    Returns:
        Problems in words, and how many replies came out again.
    """
    by_site: dict[str, list[SpooledReply]] = defaultdict(list)
    for round in sorted(replies):
        for reply in replies[round]:
            by_site[reply.meta.site].append(reply)
    problems, again = list[str](), 0
    for site, chain in sorted(by_site.items()):
        with tempfile.TemporaryDirectory() as scratch:
            replay = _Replay(config, uid, site, versions, nodes[site], Path(scratch), forgot)
            again += replay.run(chain)
            problems += [f"{site}: {problem}" for problem in replay.problems]
    return problems, again


class _Replay:
    """One site's chain of accepted rounds; see the module text."""

    def __init__(
        self, config: DiLoCoConfig, uid: str, site: str, versions: Mapping[int, Version],
        node: Mapping[str, Any], scratch: Path, forgot: bool,
    ) -> None:  # fmt: skip
        self.config, self.uid, self.site, self.versions = config, uid, site, versions
        self.node = {**node, "state-dir": str(scratch)}
        self.forgot = forgot
        self.state = SiteState(scratch, config.run_name, uid, site)
        self.left = SiteState(Path(node["state-dir"]), config.run_name, uid, site)
        self.links = Links(config, {})
        self.sums = _Sums()
        self.problems: list[str] = []

    def run(self, chain: list[SpooledReply]) -> int:
        accepted = consumed = 0
        for place, reply in enumerate(chain):
            round, version = reply.meta.round, reply.meta.version
            if self.versions[version][0] != reply.meta.base_hash:
                self.problems.append(f"round {round} was trained from no version of the run")
                return place
            request = self._request(reply, accepted, consumed)
            sent, given = self._train(request)
            if sent != reply.meta.payload_hash and self.forgot and accepted:
                # Its state was damaged: then optimizer and residual begin anew.
                self.state.save(Generation(round=accepted, consumed=consumed))
                self.sums = _Sums()
                sent, given = self._train(request, anew=True)
            if sent != reply.meta.payload_hash:
                self.problems.append(f"round {round}, trained again, gives another reply")
                return place
            self.sums.add(given, reply)
            accepted, consumed = round, int(reply.meta.metrics["consumed"])
        self._check_residual(accepted)
        return len(chain)

    def _request(self, reply: SpooledReply, accepted: int, consumed: int) -> Request:
        seen = self.links.config_for(SiteRecord(self.site), reply.meta.round).public()
        steps, round = float(self.config.inner_steps), reply.meta.round
        return Request(
            self.config.run_name, self.uid, round=round, version=reply.meta.version,
            base_hash=reply.meta.base_hash, accepted=accepted, consumed=consumed,
            position=(round - 1) * steps, span=steps, fingerprint=reply.meta.fingerprint,
            config={key: seen[key] for key in TRAINING_KEYS | {"rounds"}},
        )  # fmt: skip

    def _train(self, request: Request, *, anew: bool = False) -> tuple[str, State]:
        """Hash of the reply's payload, and the update it was made of."""
        given: State = {}
        encoded = work._encoded

        def noted(session: Any, base: State, residual: State) -> Any:
            local = session.task.local()
            given.update({name: base[name] - local[name] for name in base})
            return encoded(session, base, residual)

        with self.state:
            hash, weights = self.versions[request.version]
            self.state.save_base(request.version, hash, weights)
            if anew:  # not the answer of the first try
                shutil.rmtree(self.state.folder / f"gen-{request.round:06d}")
        with mock.patch.object(work, "_encoded", noted):
            reply = work.train_request(request, self.node)
        assert reply.arrays is not None
        return payload_hash(record_blobs(reply.arrays)), given

    def _check_residual(self, accepted: int) -> None:
        config = self.config
        if not config.error_feedback or config.feedback_decay != 1 or not self.sums.count:
            return
        if codec(config.codec_up).lossless:
            return  # weights are sent as they are: nothing is owed
        left = self.left.load(accepted)
        if left is None or not left.residual:
            if not self.forgot:
                self.problems.append(f"its residual of round {accepted} is not there")
            return
        allowed = 4.0 * self.sums.count * (1 if config.feedback_dtype == "fp32" else 2**16)
        if (gap := self.sums.gap(left.residual)) > allowed:
            self.problems.append(
                f"sum decoded + residual is not sum given: {gap:.3g} roundings apart, where "
                f"{allowed:g} are allowed"
            )
