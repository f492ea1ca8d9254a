"""``compression_mod``: the client's side of compression in any Flower app.

    app = ClientApp(mods=[compression_mod("int8(block=256)")])

with ``CompressedStrategy`` around the server's strategy.  App code sees plain
Flower Arrays and nothing else, in both directions.

What a reply holds is sent as the difference to what was received where that is
smaller (the weights of FedAvg and its kin), else as it is (an app that replies
with updates), and as it is by a lossless codec, because in fp32 ``base +
(weights - base)`` is not always ``weights``.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from flower_geo.compression.envelope import (
    KEY,
    WIDE,
    Held,
    Returned,
    Sent,
    Update,
    Work,
    carried,
    coded_array,
    decoded,
    plain_array,
    role,
    split_key,
    without_envelope,
)
from flower_geo.compression.feedback import ErrorFeedback
from flower_geo.compression.records import content_hash, unpack
from flower_geo.compression.spec import AnyCodec, codec
from flower_geo.compression.versions import Replica
from flower_geo.errors import ConfigError, CorruptPayload

__all__ = ["compression_mod"]

Plain = Mapping[str, Array]
App = Callable[[Message, Context], Message]
_BASE, _RESIDUAL, _STAGED = f"{KEY}/base/", f"{KEY}/residual", f"{KEY}/staged"


def compression_mod(
    spec: str | None = None, *, error_feedback: bool = True, decay: float = 1.0
) -> Callable[[Message, Context, App], Message]:
    """Make a mod for ``ClientApp(mods=[...])``; put it first, before mods that clip or add noise.

    Give it to the whole ClientApp: on one of its functions only, it costs the other
    function's first message.

    The weights last received, and what coding lost, live in ``Context.state``,
    out of the app's sight; a client that lost its state says so once and gets
    the weights whole in its next message.

    Args:
        spec: codec of the replies; None takes the one the server names.
        error_feedback: send later what coding an update lost.  It becomes final
            when the server's next message says that the update was handed on.
        decay: share of that carried on, in [0, 1].

    Raises:
        CodecSpecError: the spec cannot be read.
        CodecError: the decay is not between 0 and 1.

    The mod raises ``ConfigError`` for a training or evaluation request of a
    server without ``CompressedStrategy``, before the app does any work;
    ``CorruptPayload`` for a damaged request, or one it lacks the base of; and
    ``NonFiniteTensor`` for a reply that holds NaN or infinity.  Flower sends
    these to the server as an error of this client.
    """
    chosen = None if spec is None else codec(spec)
    ErrorFeedback(decay)  # refuses a wrong decay now, not in the first round

    def compression(message: Message, context: Context, call_next: App) -> Message:
        if role(message.content) != "request":
            if message.metadata.message_type.partition(".")[0] == "query":
                return call_next(message, context)
            raise ConfigError(
                "compression_mod got a request without compression: wrap the server's strategy, "
                "as in CompressedStrategy(FedAvg(), uplink='int8(block=256)', "
                "downlink='int8(block=256)'), or take the mod out of ClientApp(mods=[...])"
            )
        work = Work.from_record(message.content.config_records[KEY])
        kept = _Kept.taken_from(context.state)
        try:
            kept.settle(work.accepted)
            content, received = _decode(message.content, work, kept)
            message.content = content
            reply = call_next(message, context)
            if not reply.has_error():
                training = message.metadata.message_type.partition(".")[0] == "train"
                coder = codec(work.uplink) if chosen is None else chosen
                fed = error_feedback and training and not coder.lossless
                reply.content = _encode(
                    reply.content, received, coder, decay if fed else None, kept
                )
            return reply
        finally:
            kept.put_into(context.state)

    return compression


@dataclass
class _Base:
    """What the client holds of one record: fp32 weights, and how the app sees them."""

    stream: str
    version: int
    hash: str
    state: dict[str, Tensor]
    #: Every name of the record in its order; dtype to the app, "" for one that is not coded.
    dtypes: dict[str, str]


@dataclass
class _Kept:
    """What lives in ``Context.state`` between messages."""

    bases: dict[str, _Base] = field(default_factory=dict)
    residual: dict[str, Tensor] = field(default_factory=dict)
    staged: dict[str, Tensor] = field(default_factory=dict)
    update: str = ""

    @classmethod
    def taken_from(cls, state: RecordDict) -> _Kept:
        """Read what :meth:`put_into` wrote, and take it out of the app's sight."""
        kept = cls()
        head = state.config_records[KEY] if KEY in state.config_records else ConfigRecord()
        kept.update = str(head.get("update", ""))
        for key in [key for key in state if key.startswith(KEY)]:
            record = state.pop(key)
            if not isinstance(record, ArrayRecord):
                continue
            if key.startswith(_BASE):
                kept._read_base(key.removeprefix(_BASE), record, head)
            else:
                (kept.residual if key == _RESIDUAL else kept.staged).update(unpack(record))
        return kept

    def _read_base(self, key: str, record: ArrayRecord, head: ConfigRecord) -> None:
        stream, version, digest = str(head[f"base/{key}"]).split()
        floats = ArrayRecord({n: array for n, array in record.items() if array.dtype})
        self.bases[key] = _Base(
            stream, int(version), digest, unpack(floats), {n: a.dtype for n, a in record.items()}
        )

    def put_into(self, state: RecordDict) -> None:
        """Write it all into ``state``."""
        head: dict[str, Any] = {"update": self.update}
        for key, base in self.bases.items():
            head[f"base/{key}"] = f"{base.stream} {base.version} {base.hash}"
            record = ArrayRecord()
            for name, dtype in base.dtypes.items():
                data = plain_array(base.state[name], "float32").data if dtype else b"-"
                shape = tuple(base.state[name].shape) if dtype else ()
                record[name] = Array(dtype, shape, "numpy.ndarray", data)
            state[_BASE + key] = record
        for key, tensors in ((_RESIDUAL, self.residual), (_STAGED, self.staged)):
            if tensors:
                state[key] = ArrayRecord(
                    {n: plain_array(tensor, "float32") for n, tensor in tensors.items()}
                )
        state[KEY] = ConfigRecord(head)

    def settle(self, accepted: str) -> None:
        """The staged residual counts if its update was the one accepted, else never."""
        if self.update and accepted == self.update:
            self.residual = self.staged
        self.staged, self.update = {}, ""


# -- down ----------------------------------------------------------------------


def _decode(
    content: RecordDict, work: Work, kept: _Kept
) -> tuple[RecordDict, dict[str, tuple[Sent, dict[str, Array]]]]:
    """The content as the app is to see it, and what it received by key."""
    plain = without_envelope(content)
    received = {}
    for sent in work.sent:
        record = plain.get(sent.record)
        if not isinstance(record, ArrayRecord):
            raise CorruptPayload(f"a compressed request lacks its record {sent.record!r}")
        if sent.kind == "whole":
            arrays = dict(record)
            if sent.stream:
                _hold_whole(sent, arrays, work, kept)
        else:
            arrays = _decode_record(sent, record, kept)
        plain[sent.record] = ArrayRecord(arrays)
        # A dict of its own: the app may take arrays out of its record.
        received[sent.record] = (sent, arrays)
    return RecordDict(plain), received


def _hold_whole(sent: Sent, arrays: Plain, work: Work, kept: _Kept) -> None:
    names = [n for n in carried(arrays, work.exact) if f"{sent.record}\n{n}" not in work.uncoded]
    state = unpack(ArrayRecord({name: arrays[name] for name in names}))
    dtypes = {name: array.dtype if name in state else "" for name, array in arrays.items()}
    _hold(sent, state, dtypes, kept)


def _hold(sent: Sent, state: dict[str, Tensor], dtypes: dict[str, str], kept: _Kept) -> None:
    if content_hash(state) != sent.hash:
        raise CorruptPayload(f"version {sent.last} has another hash than the server's")
    kept.bases[sent.record] = _Base(sent.stream, sent.last, sent.hash, state, dtypes)


def _decode_record(sent: Sent, record: ArrayRecord, kept: _Kept) -> dict[str, Array]:
    """Bring the base to the version sent; return the record as the app is to see it."""
    rest: dict[str, Array] = {}
    coded: dict[str, dict[str, Array]] = {}
    for key, array in record.items():
        prefix, name = split_key(key)
        if prefix == "=":
            rest[name] = array
        else:
            coded.setdefault(prefix, {})[name] = array
    if sent.kind == "packed":
        packed = coded.get("+", {})
        order = [split_key(key)[1] for key in record]
        state = {n: torch.from_numpy(decoded(a, n)) for n, a in packed.items()}
        _hold(sent, state, {n: packed[n].dtype if n in packed else "" for n in order}, kept)
    else:
        _advance(sent, coded, kept)
    base = kept.bases[sent.record]
    if rest.keys() != {name for name, dtype in base.dtypes.items() if not dtype}:
        raise CorruptPayload(f"record {sent.record!r} holds other arrays than version {sent.last}")
    return {
        name: plain_array(base.state[name], dtype) if dtype else rest[name]
        for name, dtype in base.dtypes.items()
    }


def _advance(sent: Sent, coded: Mapping[str, Mapping[str, Array]], kept: _Kept) -> None:
    """Apply the versions that this client does not hold yet."""
    base = kept.bases.get(sent.record)
    first = sent.last + 1 if sent.kind == "none" else sent.first
    if base is None or base.stream != sent.stream or not first - 1 <= base.version <= sent.last:
        raise CorruptPayload(
            f"this client lacks what version {sent.last} of {sent.record!r} is the difference to "
            "(its Context.state was lost); its next message will hold all"
        )
    if base.version < sent.last:
        needed = range(base.version + 1, sent.last + 1)
        deltas = ArrayRecord(
            {f"{v}/{n}": a for v in needed for n, a in coded.get(str(v), {}).items()}
        )
        replica = Replica(base.state, base.version)
        replica.apply("deltas", deltas, needed[0], sent.last, sent.hash)
        base.state, base.version, base.hash = replica.state, sent.last, sent.hash
        base.dtypes |= {n: array.dtype for n, array in coded[str(sent.last)].items()}
    elif base.hash != sent.hash:
        raise CorruptPayload(f"version {sent.last} has another hash than the server's")


# -- up ------------------------------------------------------------------------


def _encode(
    content: RecordDict,
    received: Mapping[str, tuple[Sent, Plain]],
    coder: AnyCodec,
    decay: float | None,
    kept: _Kept,
) -> RecordDict:
    """The reply with coded records and an envelope; with a decay, stages residuals in ``kept``."""
    records, returned = without_envelope(content), []
    staged = dict(kept.residual)
    for key, record in records.items():
        if not isinstance(record, ArrayRecord):
            continue
        names = carried(record, coder.lossless)
        found = None if coder.lossless else _base_for(key, record, names, received)
        base = None if found is None else received[found.record][1]
        origin = ("", "", 0) if found is None else (found.record, found.stream, found.last)
        returned.append(Returned(key, *origin))
        if decay is None:
            records[key] = _encode_record(record, names, base, coder, None)
            continue
        # A residual of values says nothing of differences, and of another shape nothing.
        other, own = (f"{kind}\n{key}\n" for kind in ("values", "difference"))
        if base is None:
            other, own = own, other
        fitting = {
            name: residual for name in names
            if (residual := staged.get(own + name)) is not None
            and tuple(residual.shape) == tuple(record[name].shape)
        }  # fmt: skip
        feedback = ErrorFeedback(decay)
        feedback.load_state_dict(fitting)
        records[key] = _encode_record(record, names, base, coder, feedback)
        staged = {k: t for k, t in staged.items() if not k.startswith((own, other))}
        staged |= {own + name: t for name, t in feedback.staged_state_dict().items()}
    if decay is not None:
        kept.staged, kept.update = staged, uuid.uuid4().hex
    held = tuple(Held(key, base.stream, base.version) for key, base in kept.bases.items())
    records[KEY] = Update(kept.update, tuple(returned), held).to_record()
    return RecordDict(records)


def _base_for(
    key: str, record: Plain, names: list[str], received: Mapping[str, tuple[Sent, Plain]]
) -> Sent | None:
    """The received record to which the difference is smaller than the record itself."""
    candidate = key if key in received else next(iter(received), "")
    if not names or (candidate != key and len(received) != 1):
        return None
    sent, base = received[candidate]
    for name in names:
        other = base.get(name)
        if other is None or (other.dtype, other.shape) != (record[name].dtype, record[name].shape):
            return None
    apart = size = 0.0
    for name in names:
        values = record[name].numpy()
        size += _energy(values)
        apart += _energy(_difference(values, base[name]))
    return sent if apart <= size else None


def _energy(values: NDArray[Any]) -> float:
    flat = values.ravel().astype(np.float64, copy=False)
    return float(flat @ flat)


def _difference(values: NDArray[Any], base: Array) -> NDArray[Any]:
    wide = WIDE[base.dtype]
    with np.errstate(over="ignore", invalid="ignore"):  # the codec refuses it by name
        return np.asarray(values.astype(wide) - base.numpy().astype(wide))


def _encode_record(
    record: Plain,
    names: list[str],
    base: Plain | None,
    coder: AnyCodec,
    feedback: ErrorFeedback | None,
) -> ArrayRecord:
    coded = ArrayRecord()
    chosen = set(names)
    for name, array in record.items():
        if name not in chosen:
            coded[f"=/{name}"] = array
            continue
        values = array.numpy()
        if base is not None:
            values = _difference(values, base[name])
        tensor = torch.from_numpy(np.ascontiguousarray(values).reshape(values.shape))
        if feedback is None:
            blob = coder.encode(tensor, name)
        else:
            blob = feedback.encode(name, tensor, coder)
        coded[f"+/{name}"] = coded_array(blob, array)
    return coded
