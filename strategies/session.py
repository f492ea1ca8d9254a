"""One life of a run's coordinator: restore, rounds, commits, evaluation, end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, RecordDict
from flwr.serverapp import Grid
from torch import Tensor

from flower_geo.aggregation import Contribution
from flower_geo.compression import Broadcaster, content_hash, unpack
from flower_geo.config import CommonConfig
from flower_geo.errors import CheckpointCorrupt, FlowerGeoError, ResumeMismatch
from flower_geo.messages import Request
from flower_geo.observe import MetricsLog
from flower_geo.resilience import (
    BackgroundWriter,
    Checkpoint,
    Exchange,
    Membership,
    RoundEngine,
    RoundOutcome,
    RunFolder,
    Screen,
    SiteRecord,
    StallWatch,
)
from flower_geo.strategies.balance import Balance
from flower_geo.strategies.figures import Figures
from flower_geo.strategies.links import Links, TimedExchange
from flower_geo.strategies.policy import policy_of
from flower_geo.strategies.tally import Tally
from flower_geo.strategies.terms import Terms

__all__ = ["RunSession"]

logger = logging.getLogger("flwr")

#: Broadcast deltas kept for sites that missed rounds.
WINDOW = 8
#: Seconds a call of the SuperLink may take before somebody is told.
STALLED_AFTER = 60.0


class RunSession:
    """State of a run while one ServerApp works on it.

    Attributes:
        folder: the run folder, locked.
        broadcaster: master and shadow weights and their version.
        done: committed rounds.
        figures: what was measured last.
    """

    def __init__(self, config: CommonConfig, terms: Terms, grid: Grid, folder: RunFolder) -> None:
        self.config = config
        self.terms = terms
        self.folder = folder
        self.model = terms.model
        self.log = MetricsLog(folder.metrics_path)
        self.writer = BackgroundWriter()
        # Where no codec is to be chosen, nothing is measured.
        adaptive = Links.wanted(config)
        self.exchange = TimedExchange(grid, self._greeted) if adaptive else Exchange(grid)
        self.membership = Membership()
        self.screen = Screen(
            config.max_norm_factor, max_loss_factor=config.max_loss_factor,
            max_claim_factor=config.max_claim_factor,
        )  # fmt: skip
        self.engine = RoundEngine(
            self.exchange, self.membership, self.screen, folder.spool, policy_of(config),
            self.emit, self.model.check, terms.part,
        )  # fmt: skip
        self.broadcaster: Broadcaster
        self._kept: dict[str, Tensor] = {}
        self.links = Links(config, {})
        self.balance = Balance(config)
        self.watch = StallWatch(STALLED_AFTER, self.exchange.tell)
        self.exchange.watch = self.watch
        self.done = 0
        self.tally = Tally()
        self.figures = Figures(self.emit, self.membership, config.rounds)
        self.started = time.monotonic()

    @classmethod
    def open(cls, config: CommonConfig, terms: Terms, grid: Grid) -> RunSession:
        """Lock the run folder and begin this life of the server."""
        path = RunFolder.resolve(config.run_dir, config.run_name)
        return cls(config, terms, grid, RunFolder(path, config.public()))

    def __enter__(self) -> RunSession:
        """Return the session."""
        self.watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Finish what is being written, then let go of the run folder."""
        try:
            self.exchange.close()
            self.watch.stop()
            self.writer.wait()
        finally:
            self.log.close()
            self.folder.close()

    @property
    def master(self) -> dict[str, Tensor]:
        """The whole newest model: what sites are sent, and what stays with the coordinator."""
        return self.broadcaster.master | self._kept if self._kept else self.broadcaster.master

    def _parted(self, model: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What of a model is sent, and what is not."""
        kept = {name: tensor for name, tensor in model.items() if self.terms.kept(name)}
        return {name: t for name, t in model.items() if name not in kept}, kept

    def emit(self, event: str, /, **values: Any) -> None:
        """Write one event to the metrics log."""
        self.log.append(event=event, **self.links.note(event, values))

    def _greeted(self, records: RecordDict, seconds: float) -> None:
        self.links.greeted(records, seconds)

    # -- begin ----------------------------------------------------------------

    def restore(
        self,
        initial_arrays: ArrayRecord,
        load_outer: Callable[[Mapping[str, Tensor]], None],
        outer_state: Callable[[], dict[str, Tensor]],
    ) -> None:
        """Go on from the newest whole checkpoint, or commit the initial model as round 0."""
        self.model.prepare()
        found = self.folder.checkpoints.newest()
        if found is None:
            lost = self.folder.journal.last_round()
            if lost:
                raise CheckpointCorrupt(
                    f"run '{self.config.run_name}' committed {lost} rounds but none of its "
                    f"checkpoints can be read ({self.folder.checkpoints.folder}); restore one, "
                    "or choose another run-name"
                )
            initial, self._kept = self._parted(unpack(initial_arrays))
            self.links = Links(self.config, _shapes(initial))
            self.broadcaster = Broadcaster(
                self.links.down(0), initial, window=WINDOW, own=True, growing=self.terms.growing
            )
            self._write(0, outer_state(), {"what": "begin", "round": 0})
        else:
            self._check_schema(found.tensors["master"], initial_arrays)
            try:
                self._resume(found, load_outer)
            except (KeyError, TypeError, ValueError, AttributeError) as error:
                raise CheckpointCorrupt(
                    f"the checkpoint of round {found.round} of run '{self.config.run_name}' was "
                    f"written by another version of flower-geo ({type(error).__name__}: {error}); "
                    "resume with that version or choose another run-name"
                ) from error
        self.terms.hold(self.folder, self._kept)
        self.emit(
            "start", run=self.config.run_name, incarnation=self.folder.incarnation,
            strategy=self.terms.name, rounds=self.config.rounds,
            resumed_from=self.done if found is not None else None, model=self.config.model,
            parameters=sum(t.numel() for t in self.master.values()),
            inner_steps=self.config.inner_steps, codec_up=self.config.codec_up,
            codec_down=self.config.codec_down, seq_len=self.config.seq_len,
            batch_size=self.config.batch_size * self.config.grad_accum,
        )  # fmt: skip

    def _resume(
        self, found: Checkpoint, load_outer: Callable[[Mapping[str, Tensor]], None]
    ) -> None:
        (master, self._kept), state = self._parted(found.tensors["master"]), found.state
        self.links = Links(self.config, _shapes(master), state.get("links"))
        self.broadcaster = Broadcaster.restore(
            self.links.down(found.round), master, found.tensors["shadow"],
            found.tensors.get("deltas", {}), state["broadcast"], self.terms.growing,
        )  # fmt: skip
        load_outer(found.tensors.get("outer", {}))
        self.membership.restore(state["sites"])
        self.screen.restore(state.get("screen", state))
        self.balance = Balance(self.config, state.get("balance"))
        self.tally = Tally(state.get("tally"))
        self.done = found.round
        if self.folder.journal.last_round() < self.done:
            # The crash came between the rename and the journal's line.
            self.folder.journal.append(state["journal"])
        self.writer.submit(lambda whole=self.master: self.measure(self.done, whole))  # type: ignore[misc]

    def _check_schema(self, master: Mapping[str, Tensor], initial: ArrayRecord) -> None:
        given = {name: tuple(array.shape) for name, array in initial.items()}
        grown = self.terms.growing
        if {name: s for name, s in _shapes(master).items() if not grown(name)} != given:
            raise ResumeMismatch(
                f"the checkpoint of run '{self.config.run_name}' holds another model than "
                f"{self.config.model!r}; resume with its own model or choose another run-name"
            )

    def assemble(self) -> None:
        """Wait for the sites and greet them."""
        online = self.engine.assemble(self._hello, committed=self.done > 0)
        logger.info("sites: %s", ", ".join(record.name for record in online))
        self.emit("sites", sites=[record.name for record in online])

    # -- requests -------------------------------------------------------------

    def request(self, record: SiteRecord | None, **values: Any) -> Request:
        """A request to a site, or (None) a greeting, with what all of them have in common."""
        seen = self.balance.config_for(record, self.links.config_for(record, self.done + 1))
        public = seen.public()
        config = {key: public[key] for key in sorted(self.config.training_keys | {"rounds"})}
        common: dict[str, Any] = {
            "run_name": self.config.run_name, "run_uid": self.folder.uid,
            "incarnation": self.folder.incarnation, "version": self.broadcaster.version,
            "base_hash": self.broadcaster.hash, "fingerprint": seen.fingerprint(),
            "config": config,
        }  # fmt: skip
        if record is not None:
            offer = self.broadcaster.offer(record.held_version, record.held_hash)
            common |= {
                "payload": offer.kind, "first": offer.first, "last": offer.last,
                "arrays": offer.record, "accepted": record.accepted, "consumed": record.consumed,
                "stream": self.terms.stream(values["round"], record.name),
            }  # fmt: skip
        return Request(**(common | values))

    def _hello(self) -> Request:
        return self.request(None)

    def _train_request(self, record: SiteRecord, attempt: int) -> Request:
        round, steps = self.done + 1, self.balance.steps(record.name)
        return self.request(
            record, round=round, attempt=attempt, position=float((round - 1) * steps),
            span=float(steps), evaluate=self._due(self.done),
        )  # fmt: skip

    def _due(self, version: int) -> bool:
        every = self.config.eval_every
        return version == 0 if every == 0 else version % every == 0

    # -- a round --------------------------------------------------------------

    def gather(self, attempt: int) -> RoundOutcome:
        """Collect the replies of the next round."""
        if attempt == 1:
            self.figures.begin()
        return self.engine.gather(
            self.done + 1, attempt, self._hello,
            lambda record: self._train_request(record, attempt),
            self.broadcaster.shadow, self._base_of, self.terms.convene,
        )  # fmt: skip

    def _base_of(self, version: int) -> Mapping[str, Tensor] | None:
        if version not in self.folder.checkpoints.rounds():
            return None
        try:
            return self.folder.checkpoints.load(version).tensors["shadow"]
        except FlowerGeoError:
            return None

    def back_off(self, attempt: int) -> None:
        """Wait before a round is tried again: 1, 2, 4, ... seconds, 30 at most."""
        self.exchange.sleep(min(2.0 ** (attempt - 1), 30.0))

    def fold(
        self,
        next_model: Callable[
            [Mapping[str, Tensor], Mapping[str, Tensor], Sequence[Contribution]], dict[str, Tensor]
        ],
        outcome: RoundOutcome,
    ) -> dict[str, Tensor]:
        """Make the next model from the round's replies."""
        began = time.monotonic()
        master = {**self.broadcaster.carried(self.config.downlink_decay), **self._kept}
        following = next_model(master, self.broadcaster.shadow, outcome.replies)
        self.figures.seconds_fold = time.monotonic() - began
        return following

    def commit(
        self, following: dict[str, Tensor], outer: dict[str, Tensor], outcome: RoundOutcome
    ) -> None:
        """Make the round final; the writing goes on beside the next round."""
        self.figures.evaluation(self.done, outcome)
        waited = time.monotonic()
        self.writer.wait()
        seconds_commit = time.monotonic() - waited
        self.links.settle(outcome, lambda: self.membership.online(self.exchange.nodes()))
        sent, self._kept = self._parted(following)
        self.broadcaster.advance(sent, codec=self.links.down(self.done + 1), own=True)
        self.terms.hold(self.folder, self._kept)
        self.done += 1
        self.tally.add(outcome)
        self.balance.settle(outcome, self.done)
        for reply in outcome.replies:
            record = self.membership.sites[reply.meta.site]
            record.accepted = reply.meta.round
            record.consumed = int(reply.meta.metrics.get("consumed", 0))
        entry: dict[str, Any] = {
            "what": "commit", "round": self.done, "hash": self._master_hash(),
            "incarnation": self.folder.incarnation, "time": round(time.time(), 3),
            "replies": [
                {
                    "site": reply.meta.site, "round": reply.meta.round, "weight": reply.weight,
                    "payload": reply.meta.payload_hash,
                }
                for reply in outcome.replies
            ],
        }  # fmt: skip
        done = self.done
        self._write(done, outer, entry, then=lambda: self.folder.spool.clear(done))
        self.figures.round(self.done, outcome, entry["hash"], seconds_commit)

    def _master_hash(self) -> str:
        """Content hash of the master; under a lossless codec it is the shadow, hashed already."""
        same = self.broadcaster.shadow is self.broadcaster.master and not self._kept
        return self.broadcaster.hash if same else content_hash(self.master)

    def _write(
        self,
        round: int,
        outer: dict[str, Tensor],
        entry: dict[str, Any],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Hand a checkpoint of the present state to the background writer.

        Every tensor handed over is never changed in place afterwards.
        """
        deltas, broadcast = self.broadcaster.state()
        tensors = {
            "master": self.master, "shadow": self.broadcaster.shadow,
            "outer": outer, "deltas": deltas,
        }  # fmt: skip
        state = {
            "sites": self.membership.state(), "screen": self.screen.state(),
            "broadcast": broadcast, "journal": entry, "config": self.config.public(),
            "links": self.links.state(), "balance": self.balance.state(),
            "tally": self.tally.state(),
        }  # fmt: skip
        facts, master = self.facts(), self.master

        def work() -> None:
            self.folder.checkpoints.save(round, tensors, state)
            self.folder.journal.append(entry)
            then()
            if round:
                self.model.export(master, self.folder.path / "model", facts)
            self.measure(round, master)

        self.writer.submit(work)

    def measure(self, version: int, master: Mapping[str, Tensor]) -> None:
        """Evaluate on the coordinator's own set, where it has one."""
        if self._due(version) and (found := self.model.measure(master)):
            self.figures.server(version, found)

    def facts(self) -> dict[str, Any]:
        """What a model card says of the run so far."""
        return {"rounds": f"{self.done} of {self.config.rounds}"} | self.tally.facts()


def _shapes(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
