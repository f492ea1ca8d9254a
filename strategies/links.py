"""The adaptive choice of codecs, wired to a run: measuring, choosing, reporting.

What a reply's trip took is written into the reply's own metrics before anyone else
reads it.  So it is spooled and committed with the reply, and a coordinator that
resumes chooses from the same numbers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

from flower_geo.compression import codec, record_nbytes
from flower_geo.compression.adaptive import ADAPTIVE, AdaptiveChoice, Budget, ladder
from flower_geo.compression.spec import AnyCodec
from flower_geo.config import CommonConfig
from flower_geo.errors import CodecSpecError, ConfigError, ReplyRefused
from flower_geo.messages import Reply
from flower_geo.resilience import Exchange, RoundOutcome, SiteRecord
from flower_geo.resilience.exchange import QUERY, TRAIN, Incoming, Open

__all__ = ["Links", "TimedExchange", "check_codecs"]

#: Metrics this side writes; whatever a site claims under these names is dropped.
SECONDS, UP, DOWN = "link-seconds", "link-bytes-up", "link-bytes-down"
#: Flower's shortest and longest pause, in seconds, before it looks again for a tensor that
#: is still uploaded.
FIRST_PAUSE, LONGEST_PAUSE = 0.8, 10.0


def check_codecs(config: CommonConfig) -> None:
    """Read every codec a run may use, so that a typo ends at once.

    Raises:
        CodecSpecError: a spec or a rung of the ladder cannot be read.
        ConfigError: an adaptive codec without error feedback up.
    """
    specs = config.public()
    readers: list[tuple[str, Callable[[str], object]]] = [
        (key, codec) for key in ("codec-up", "codec-down") if specs[key] != ADAPTIVE
    ]
    if len(readers) < 2:
        readers.append(("codec-ladder", ladder))
    if config.dense_rounds or config.dense_last_rounds:
        readers.append(("dense-codec", codec))
    for key, read in readers:
        try:
            read(str(specs[key]))
        except CodecSpecError as error:
            raise CodecSpecError(f"run-config {key}: {error}") from None
    if config.codec_up == ADAPTIVE and not config.error_feedback:
        raise ConfigError(
            "codec-up='adaptive' needs error-feedback=true: codecs change over the rounds, and "
            "without it what one of them lost would be lost for good"
        )


class _TimedGrid:
    """Flower's grid with a note of when each reply was there, all of it.

    Replies are looked for one after another, so one that is whole may have come
    anywhere between the last look for it and this one: it is taken to have come
    half-way.  One still on its way is waited for by Flower, with pauses that double up
    to ten seconds: it is taken to have come half-way through the last.
    """

    def __init__(self, grid: Grid, clock: Callable[[], float]) -> None:
        self.grid, self.clock = grid, clock
        self.arrived: dict[str, float] = {}
        self._looked: dict[str, float] = {}

    def get_node_ids(self) -> Iterable[int]:
        return self.grid.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = list(self.grid.push_messages(messages))
        self._looked |= dict.fromkeys(ids, self.clock())
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        # The exchange asks for one message at a time, for several beside each other.
        ids, began = list(message_ids), self.clock()
        found = list(self.grid.pull_messages(ids))
        ended = self.clock()
        for key in ids:
            before = self._looked.pop(key, began)
            if not found:
                self._looked[key] = began
            elif ended - began > FIRST_PAUSE:
                self.arrived[key] = ended - min((ended - began) / 2, LONGEST_PAUSE) / 2
            else:
                self.arrived[key] = (before + began) / 2
        return found


class TimedExchange(Exchange):
    """An exchange that tells how long each message was on the way.

    Args:
        grid: Flower's grid.
        greeted: takes the records of a greeting and its seconds on the way.
        clock, sleep: replaceable for tests.
    """

    def __init__(
        self,
        grid: Grid,
        greeted: Callable[[RecordDict, float], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._timed = _TimedGrid(grid, clock)
        self._greeted = greeted
        self._down: dict[Open, int] = {}
        super().__init__(self._timed, clock=clock, sleep=sleep)  # type: ignore[arg-type]

    def push(self, node_id: int, site: str, round: int, kind: str, records: RecordDict) -> bool:
        """Send one request and note what it carries; see ``Exchange.push``."""
        arrays = records["arrays"] if "arrays" in records else None
        if not super().push(node_id, site, round, kind, records):
            return False
        if isinstance(arrays, ArrayRecord):
            kept = {each: self._down[each] for each in self.open.values() if each in self._down}
            self._down = kept | {self.open[next(reversed(self.open))]: record_nbytes(arrays)}
        return True

    def take(self, until: float, wanted: Callable[[Open], bool]) -> Iterator[Incoming]:
        """Yield replies as they arrive, the time they took written into them."""
        for incoming in super().take(until, wanted):
            request, down = incoming.request, self._down.pop(incoming.request, 0)
            arrived = self._timed.arrived.pop(request.message_id, None)
            if incoming.records is not None and arrived is not None:
                self._stamp(request, incoming.records, down, arrived)
            yield incoming

    def _stamp(self, request: Open, records: RecordDict, down: int, arrived: float) -> None:
        geo = records["geo"] if "geo" in records else None
        metrics = records["metrics"] if "metrics" in records else None
        if not isinstance(geo, ConfigRecord) or not isinstance(metrics, MetricRecord):
            return  # refused when it is read
        for key in (SECONDS, UP, DOWN):
            metrics.pop(key, None)
        at_work = geo.get("at_work")
        if not isinstance(at_work, float) or not math.isfinite(at_work):
            return
        seconds = arrived - request.pushed_at - at_work
        if request.kind == QUERY:
            self._greeted(records, seconds)
        elif request.kind == TRAIN and seconds > 0:
            arrays = records["arrays"] if "arrays" in records else None
            up = record_nbytes(arrays) if isinstance(arrays, ArrayRecord) else 0
            metrics[SECONDS], metrics[UP], metrics[DOWN] = seconds, float(up), float(down)


class Links:
    """What a run's session asks for codecs; without ``adaptive`` it only passes on.

    Args:
        config: the run's configuration.
        shapes: the model's tensors.
        state: what :meth:`state` gave, from the checkpoint; None at the beginning.

    Raises:
        CodecSpecError: the ladder does not fit the model.
    """

    def __init__(
        self,
        config: CommonConfig,
        shapes: Mapping[str, tuple[int, ...]],
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.config = config
        self._choice: AdaptiveChoice | None = None
        self._missed: set[str] = set()
        if not self.wanted(config):
            return
        self._choice = AdaptiveChoice(
            ladder(config.codec_ladder), Budget.read(config.comm_target), shapes,
            config.downlink_quantile,
        )  # fmt: skip
        if state is not None:
            self._choice.restore(state)

    @staticmethod
    def wanted(config: CommonConfig) -> bool:
        """Whether the configuration leaves a codec to choose."""
        return ADAPTIVE in (config.codec_up, config.codec_down)

    def greeted(self, records: RecordDict, seconds: float) -> None:
        """Note a site's empty round trip and the speeds it gives by hand."""
        if self._choice is None:
            return
        try:
            reply = Reply.from_records(records)
        except ReplyRefused:
            return  # turned away where greetings are judged
        speeds = (reply.metrics.get(key) for key in ("uplink-mbps", "downlink-mbps"))
        up, down = (speed * 1e6 / 8 if speed and speed > 0 else None for speed in speeds)
        self._choice.greet(reply.site, seconds, up, down)

    # -- choices ----------------------------------------------------------------

    def config_for(self, record: SiteRecord | None, round: int) -> CommonConfig:
        """The configuration as one site is to see it in ``round``, its codec named."""
        if self._dense(round):
            return self.config.model_copy(update={"codec_up": self.config.dense_codec})
        if self._choice is None or self.config.codec_up != ADAPTIVE:
            return self.config
        spec = self._choice.up(record.name) if record is not None else self._choice.rungs[-1]
        return self.config.model_copy(update={"codec_up": spec})

    def _dense(self, round: int) -> bool:
        config = self.config
        return round > 0 and (
            round <= config.dense_rounds or round > config.rounds - config.dense_last_rounds
        )

    def down(self, round: int) -> AnyCodec:
        """Codec of the broadcast that follows ``round``."""
        if self._dense(round):
            return codec(self.config.dense_codec)
        if self._choice is None or self.config.codec_down != ADAPTIVE:
            return codec(self.config.codec_down)
        return codec(self._choice.down)

    def settle(self, outcome: RoundOutcome, online: Callable[[], Iterable[SiteRecord]]) -> None:
        """Learn from a round that is being committed, and choose for the next one."""
        if self._choice is None:
            return
        present = {record.name for record in online()}
        answered = set()
        for reply in outcome.replies:
            metrics, site = reply.meta.metrics, reply.meta.site
            answered.add(site)
            if SECONDS in metrics:
                self._choice.observe(
                    site, metrics[UP], metrics[DOWN], metrics[SECONDS],
                    metrics.get("seconds-total", 0.0),
                )  # fmt: skip
        for site in sorted((self._missed & present) - answered):
            self._choice.missed(site)
        self._missed.clear()
        self._choice.settle(present)

    def state(self) -> dict[str, Any] | None:
        """JSON state for the checkpoint."""
        return None if self._choice is None else self._choice.state()

    # -- figures ----------------------------------------------------------------

    def note(self, event: str, values: dict[str, Any]) -> dict[str, Any]:
        """An event with what is known of the site's line and the codecs added.

        ``speed_up`` and ``speed_down`` are bytes a second; ``codec_why`` and
        ``codec_down_why`` say why a codec is another one than in the round before.
        """
        if self._choice is None:
            return values
        if event == "site":
            site = values["site"]
            if values["status"] == "missing":
                self._missed.add(site)
            up, down = self._choice.speeds(site)
            added: dict[str, Any] = {"speed_up": up, "speed_down": down}
            if self.config.codec_up == ADAPTIVE:
                added |= {"codec_up": self._choice.up(site), "codec_why": self._choice.why(site)}
            return {**added, **{key: value for key, value in values.items() if value is not None}}
        if event == "round" and self.config.codec_down == ADAPTIVE:
            return {
                **values, "codec_down": self._choice.down, "codec_down_why": self._choice.why(),
            }  # fmt: skip
        return values
