"""``CompressedStrategy``: the server's side of compression around any Flower strategy.

    strategy = CompressedStrategy(FedAvg(), uplink="int8(block=256)", downlink="int8(block=256)")
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=10)

with ``compression_mod`` in the ClientApp.  The protocol needs no message of its own:

1. A client that has not yet answered with the mod gets plain Arrays and one
   ConfigRecord more, so a stock client works from the first round on, and goes
   on getting plain Arrays.
2. A client with the mod keeps these as its base and says so in its reply.  From
   then on it gets versions: the coded difference of what it holds to what all
   clients are to hold, or nothing where it holds that (the evaluation of a round
   and the training of the next use the same weights).
3. A reply is a coded difference to what this client was sent.  It is added to the
   strategy's own weights, so what coding the downlink lost is not lost: it stays in
   the difference of these to what clients hold, and goes out with the next version.
4. The next message to a client says which of its updates was handed on; its
   residual becomes final only then.
5. After an error of a client, it gets plain Arrays again, which mends whatever
   it lacked, as after a restart without its state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from flower_geo.compression.downlink import Stream, digest_of
from flower_geo.compression.envelope import (
    KEY,
    Returned,
    Sent,
    Update,
    Work,
    check_plain,
    content_nbytes,
    role,
    without_envelope,
)
from flower_geo.compression.records import record_nbytes
from flower_geo.compression.spec import codec
from flower_geo.compression.uplink import decode_record, odd_schemas, size
from flower_geo.errors import CodecError, ConfigError, CorruptPayload
from flower_geo.messages import one_line

__all__ = ["CompressedStrategy", "Traffic"]

#: Flower's own logger: what it writes stands in the run's log.
_LOG = logging.getLogger("flwr")
_METHODS = (
    "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary",
)  # fmt: skip
_OWN = frozenset({"strategy", "uplink", "downlink", "window", "strict", "traffic"})
#: Values a reply may hold beyond a few times as many as were sent.
_SPARE_VALUES = 2**24


@dataclass
class Traffic:
    """Payload bytes over all clients, and replies refused.

    Attributes:
        down, up: as sent.
        plain_down, plain_up: what Flower would have sent without compression.
        refused: replies left out because they were damaged or did not fit.
    """

    down: int = 0
    up: int = 0
    plain_down: int = 0
    plain_up: int = 0
    refused: int = 0

    def add(self, other: Traffic) -> None:
        """Add another count to this one."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def metrics(self) -> dict[str, int]:
        """As a round's metrics name them."""
        return {
            "geo-bytes-down": self.down, "geo-bytes-up": self.up,
            "geo-plain-bytes-down": self.plain_down, "geo-plain-bytes-up": self.plain_up,
            "geo-refused": self.refused,
        }  # fmt: skip


@dataclass
class _Node:
    """What the server knows of a client.

    Attributes:
        stock: message types that it answered without the mod.
        accepted: its last update that was handed on.
        held: (stream, version) by record.
        plain: message types that go out whole until one is answered with the mod.
        sent: records of no stream that it was sent last.
    """

    stock: set[str] = field(default_factory=set)
    accepted: str = ""
    held: dict[str, tuple[str, int]] = field(default_factory=dict)
    plain: set[str] = field(default_factory=set)
    sent: dict[str, ArrayRecord] = field(default_factory=dict)


class CompressedStrategy(Strategy):
    """Any strategy of ``flwr.serverapp.strategy`` with compressed messages; see the module text.

    Wrap last: ``CompressedStrategy(DifferentialPrivacy...(FedAvg()))``, because what
    the wrapped strategy sees are plain Arrays.  Everything else (attributes,
    ``start``, a ``start`` of the strategy's own) is the wrapped strategy's.
    Metrics of a round gain ``geo-bytes-down``, ``geo-bytes-up``, ``geo-plain-bytes-down``,
    ``geo-plain-bytes-up`` and ``geo-refused``.

    Args:
        strategy: the strategy.
        uplink: codec of replies from clients whose mod names none.
        downlink: codec of what clients with the mod are sent.
        window: rounds a client may miss and still get differences.
        strict: leave out a training reply whose tensors are not those of the other
            replies, which would end FedAvg's run; False for a strategy that takes
            clients of different shapes.

    Attributes:
        traffic: :class:`Traffic` of all rounds.

    Raises:
        CodecSpecError: a codec cannot be read.
        ConfigError: the strategy is none of ``flwr.serverapp.strategy``, or compressed already.

    A damaged, hostile or non-finite reply is left out of its round with one line
    in the log.  ``CorruptPayload`` is raised when the strategy's own weights hold
    NaN or infinity.
    """

    def __init__(
        self,
        strategy: Strategy,
        uplink: str = "int8(block=256)",
        downlink: str = "int8(block=256)",
        *,
        window: int = 4,
        strict: bool = True,
    ) -> None:
        wrappable: object = strategy
        if not isinstance(wrappable, Strategy) or isinstance(wrappable, CompressedStrategy):
            raise ConfigError(
                f"CompressedStrategy cannot wrap {type(strategy).__name__}; give it one strategy "
                "of flwr.serverapp.strategy, such as FedAvg()"
            )
        self.strategy = strategy
        self.uplink, self.downlink = codec(uplink).spec, codec(downlink).spec
        self.window, self.strict = window, strict
        self.traffic = Traffic()
        self._coder = codec(downlink)
        self._streams: dict[str, Stream] = {}
        self._nodes: dict[int, _Node] = {}
        self._rounds: dict[str, Traffic] = {}
        self._values = 0
        self._replaced: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        # Only for what is not found here.  A half-made copy has no strategy yet.
        if name.startswith("__") or "strategy" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.strategy, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN or name.startswith("_") or not hasattr(self.__dict__["strategy"], name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.strategy, name, value)

    # -- Flower's interface ----------------------------------------------------

    def start(self, *args: Any, **kwargs: Any) -> Result:
        """Run the wrapped strategy's ``start``, with its messages compressed."""
        with self._in_place():
            return self.strategy.start(*args, **kwargs)

    def summary(self) -> None:
        """Log the codecs, then the strategy's own summary."""
        _LOG.info("\t├──> Compression: uplink %s | downlink %s", self.uplink, self.downlink)
        self._of_strategy("summary")()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Encode what the strategy sends for training."""
        made = self._of_strategy("configure_train")(server_round, arrays, config, grid)
        return self._send("train", made)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Encode what the strategy sends for evaluation."""
        made = self._of_strategy("configure_evaluate")(server_round, arrays, config, grid)
        return self._send("evaluate", made)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode replies and hand the good ones to the strategy."""
        good = self._receive("train", replies)
        arrays, metrics = self._of_strategy("aggregate_train")(server_round, good)
        return arrays, self._counted("train", metrics)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Decode replies and hand the good ones to the strategy."""
        good = self._receive("evaluate", replies)
        metrics = self._of_strategy("aggregate_evaluate")(server_round, good)
        return self._counted("evaluate", metrics)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """For a while the strategy's methods are ours, so that its own ``start`` calls them."""
        own = vars(self.strategy)
        before = {name: own[name] for name in _METHODS if name in own}
        self._replaced = {name: getattr(self.strategy, name) for name in _METHODS}
        own.update({name: getattr(self, name) for name in _METHODS})
        try:
            yield
        finally:
            for name in _METHODS:
                del own[name]
            own.update(before)
            self._replaced = {}

    def _of_strategy(self, name: str) -> Any:
        return self._replaced.get(name) or getattr(self.strategy, name)

    def _counted(self, phase: str, metrics: MetricRecord | None) -> MetricRecord | None:
        round_ = self._rounds.pop(phase, Traffic())
        self.traffic.add(round_)
        if metrics is not None:
            metrics.update(round_.metrics())
        return metrics

    # -- down ------------------------------------------------------------------

    def _send(self, phase: str, made: Iterable[Message]) -> list[Message]:
        messages = list(made)
        count = self._rounds.setdefault(phase, Traffic())
        streams = self._follow(messages)
        for message in messages:
            node = self._nodes.setdefault(message.metadata.dst_node_id, _Node())
            node.sent = {}
            records, sent = without_envelope(message.content), []
            for key, record in message.content.array_records.items():
                count.plain_down += record_nbytes(record)
                how, records[key] = self._record_for(
                    node, message.metadata.message_type, key, record, streams.get(key)
                )
                sent.append(how)
            uncoded = tuple(
                f"{how.record}\n{name}" for how in sent
                if how.kind == "whole" and how.stream
                for name in streams[how.record].uncoded
            )  # fmt: skip
            exact = self._coder.lossless
            work = Work(self.uplink, exact, node.accepted, tuple(sent), uncoded).to_record()
            # A new RecordDict: strategies share one among their messages.
            message.content = RecordDict({**records, KEY: work})
            count.down += content_nbytes(message.content)
        return messages

    def _follow(self, messages: list[Message]) -> dict[str, Stream]:
        """Bring the streams up to date; a record that differs by client has none."""
        by_key: dict[str, dict[int, ArrayRecord]] = {}
        for message in messages:
            for key, record in message.content.array_records.items():
                by_key.setdefault(key, {})[id(record)] = record
        found = {}
        for key, records in by_key.items():
            first = next(iter(records.values()))
            self._values = max(self._values, size(first))
            if len(records) > 1 and len({digest_of(each) for each in records.values()}) > 1:
                continue
            try:
                if key in self._streams:
                    self._streams[key].follow(first)
            except CorruptPayload:
                raise
            except CodecError:
                del self._streams[key]  # other tensors than before: another stream
            if key not in self._streams:
                self._streams[key] = Stream(first, self._coder, self.window)
            found[key] = self._streams[key]
        return found

    def _record_for(
        self, node: _Node, kind: str, key: str, record: ArrayRecord, stream: Stream | None
    ) -> tuple[Sent, ArrayRecord]:
        if stream is None or kind in node.stock or not stream.broadcaster.shadow:
            node.sent[key] = record
            return Sent(key, "whole"), ArrayRecord(dict(record))
        name, version = node.held.get(key, ("", 0))
        known = name == stream.id and kind not in node.plain
        return stream.send(key, version if known else None)

    # -- up --------------------------------------------------------------------

    def _receive(self, phase: str, replies: Iterable[Message]) -> list[Message]:
        count = self._rounds.setdefault(phase, Traffic())
        errors: list[Message] = []
        good: list[tuple[Message, str]] = []
        for reply in replies:
            node = self._nodes.setdefault(reply.metadata.src_node_id, _Node())
            if reply.has_error():
                node.held.clear()
                node.plain.add(reply.metadata.message_type)
                errors.append(reply)
                continue
            count.up += content_nbytes(reply.content)
            try:
                reply.content, update = self._decode(node, reply)
            except CorruptPayload as error:
                self._refuse(count, reply, str(error))
                continue
            count.plain_up += content_nbytes(reply.content)
            good.append((reply, update))
        odd = [False] * len(good)
        if phase == "train" and self.strict:
            sent = [stream.newest for stream in self._streams.values()]
            odd = odd_schemas([reply.content for reply, _ in good], sent)
        for (reply, update), is_odd in zip(good, odd, strict=True):
            if is_odd:
                self._refuse(
                    count, reply,
                    "its tensors are not those of the other replies; "
                    "CompressedStrategy(strict=False) lets it through",
                )  # fmt: skip
            elif update:
                self._nodes[reply.metadata.src_node_id].accepted = update
        kept = [reply for (reply, _), is_odd in zip(good, odd, strict=True) if not is_odd]
        return kept + errors

    def _refuse(self, count: Traffic, reply: Message, why: str) -> None:
        count.refused += 1
        _LOG.warning(
            "compression: the reply of node %d is left out: %s",
            reply.metadata.src_node_id, one_line(why),
        )  # fmt: skip

    def _decode(self, node: _Node, reply: Message) -> tuple[RecordDict, str]:
        """The content in plain Arrays, and the name of the update in it."""
        content = reply.content
        records = without_envelope(content)
        update = None
        # A client that sends back all it got sends the request's envelope.
        if KEY in content and role(content) != "request":
            envelope = content[KEY]
            if role(content) != "reply" or not isinstance(envelope, ConfigRecord):
                raise CorruptPayload("its compression envelope is damaged")
            update = Update.from_record(envelope)
        coded = {} if update is None else {each.record: each for each in update.returned}
        if missing := [key for key in coded if not isinstance(records.get(key), ArrayRecord)]:
            raise CorruptPayload(f"it lacks the record {missing[0]!r} that it announces")
        for key, record in records.items():
            if not isinstance(record, ArrayRecord):
                continue
            if key in coded:
                base = self._base(node, coded[key])
                most = _SPARE_VALUES + 4 * self._values
                records[key] = decode_record(record, base, most)
            else:
                for name, array in record.items():
                    check_plain(name, array)
        kind = reply.metadata.message_type
        if update is None:
            node.stock.add(kind)
            return RecordDict(records), ""
        node.stock.discard(kind)
        node.plain.discard(kind)
        node.held = {each.held: (each.held_stream, each.held_version) for each in update.held}
        return RecordDict(records), update.update

    def _base(self, node: _Node, how: Returned) -> ArrayRecord | None:
        if not how.base:
            return None
        stream = self._streams.get(how.base)
        found = node.sent.get(how.base) if not how.stream else None
        if stream is not None and how.stream == stream.id:
            found = stream.given.get(how.version)
        if found is None:
            raise CorruptPayload(
                f"record {how.record[:40]!r} is the difference to none sent lately"
            )
        return found
