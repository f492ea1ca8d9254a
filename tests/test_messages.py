"""Requests and replies: exact over the wire, and nothing ill-formed gets through."""

from __future__ import annotations

import math
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.errors import ConfigError, ReplyRefused
from flower_geo.messages import PROTOCOL, Reply, Request, one_line

ARRAYS = {"w": Array("float32", (2, 1), "geo/1", b"\x00\x01\xff")}
REQUEST: dict[str, Any] = {
    "run_name": "run", "run_uid": "0011aabb", "incarnation": 2, "round": 7, "attempt": 3,
    "version": 6, "base_hash": "ab" * 32, "accepted": 5, "consumed": 2**40, "position": 12.5,
    "span": 2.0, "fingerprint": "f" * 16, "payload": "deltas", "first": 5, "last": 6,
    "evaluate": True, "config": {"inner-lr": 0.1, "model": "gpt2-nano", "error-feedback": False},
}  # fmt: skip
REPLY: dict[str, Any] = {
    "status": "done", "site": "north-1", "detail": "fine", "round": 7, "version": 6,
    "base_hash": "ab" * 32, "fingerprint": "f" * 16, "kind": "delta", "held_version": 6,
    "held_hash": "cd" * 32, "tokenizer_hash": "ef" * 32, "data": "corpus:sotu", "codec": "fp32",
    "metrics": {"tokens": 128.0, "train-loss": 3.5, "seconds": 0.25},
}  # fmt: skip


def wire(records: RecordDict) -> RecordDict:
    return recorddict_from_proto(recorddict_to_proto(records))


def request_records(**changed: Any) -> RecordDict:
    return changing(Request(**REQUEST, arrays=ArrayRecord(ARRAYS)).to_records(), changed)


def reply_records(**changed: Any) -> RecordDict:
    return changing(Reply(**REPLY, arrays=ArrayRecord(ARRAYS)).to_records(), changed)


def changing(records: RecordDict, changed: dict[str, Any]) -> RecordDict:
    geo = dict(records.config_records["geo"])
    for key, value in changed.items():
        if value is None:
            del geo[key]
        else:
            geo[key] = value
    records["geo"] = ConfigRecord(geo)
    return records


def reply_with_metrics(**metrics: Any) -> RecordDict:
    records = reply_records()
    records["metrics"] = MetricRecord({k.replace("_", "-"): v for k, v in metrics.items()})
    return records


# -- round trips ----------------------------------------------------------------


@pytest.mark.parametrize("arrays", [None, ARRAYS, {}])
def test_round_trip_over_the_wire(arrays: dict[str, Array] | None) -> None:
    record = None if arrays is None else ArrayRecord(arrays)
    request, reply = Request(**REQUEST, arrays=record), Reply(**REPLY, arrays=record)
    assert Request.from_records(wire(request.to_records())) == request
    assert Reply.from_records(wire(reply.to_records())) == reply
    assert Request.from_records(wire(Request("r", "u").to_records())) == Request("r", "u")
    refusal = Reply(status="refused", site="x")
    assert Reply.from_records(wire(refusal.to_records())) == refusal


def test_every_message_has_records_of_its_own() -> None:
    request = Request(**REQUEST)
    one, two = request.to_records(), request.to_records()
    one.config_records["config"]["model"] = "other"
    assert two.config_records["config"]["model"] == "gpt2-nano"
    assert request.config["model"] == "gpt2-nano"


# -- fields of the wrong type or size -------------------------------------------

WRONG: list[Any] = [
    b"bytes", [1, 2], ["text"], 2**62, -(2**62), -2, 0.5, math.nan, math.inf, -math.inf, 1e300,
    True, "x" * 1_000_000, "a\nb", "", "\x1b[2J",
]  # fmt: skip


def fits(cls: type[Request] | type[Reply], key: str, value: object) -> bool:
    """Whether a value is one this field may hold; written down apart from the code under test."""
    texts = {"detail", "error", "data", "codec"}
    hashes = {"base_hash", "fingerprint", "held_hash", "tokenizer_hash"}
    if key in texts:
        return isinstance(value, str)
    if key in hashes:
        return isinstance(value, str) and len(value) <= 128
    if key == "evaluate":
        return isinstance(value, bool)
    if key in ("position", "span"):
        return isinstance(value, float) and 0 <= value <= 2**53
    return False


@pytest.mark.parametrize("value", WRONG, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize("key", sorted(set(REQUEST) - {"config"} | {"protocol"}))
def test_a_request_field_of_the_wrong_kind(key: str, value: Any) -> None:
    records = request_records(**{key: value})
    if fits(Request, key, value):
        Request.from_records(records)
        return
    with pytest.raises(ConfigError) as caught:
        Request.from_records(records)
    assert len(str(caught.value)) < 700 and str(caught.value).isprintable()


@pytest.mark.parametrize("value", WRONG, ids=lambda v: str(v)[:12])
@pytest.mark.parametrize("key", sorted(set(REPLY) - {"metrics"} | {"protocol", "error"}))
def test_a_reply_field_of_the_wrong_kind(key: str, value: Any) -> None:
    records = reply_records(**{key: value})
    if fits(Reply, key, value):
        reply = Reply.from_records(records)
        assert len(getattr(reply, key)) <= 500
        return
    with pytest.raises(ReplyRefused) as caught:
        Reply.from_records(records)
    assert len(str(caught.value)) < 700 and str(caught.value).isprintable()


def test_every_missing_field_is_named() -> None:
    for key in request_records().config_records["geo"]:
        with pytest.raises(ConfigError, match=key):
            Request.from_records(request_records(**{key: None}))
    for key in reply_records().config_records["geo"]:
        with pytest.raises(ReplyRefused, match=key):
            Reply.from_records(reply_records(**{key: None}))


def test_a_held_version_of_minus_one_means_none() -> None:
    assert Reply.from_records(reply_records(held_version=-1)).held_version == -1


@pytest.mark.parametrize("name", ["geo", "config", "metrics", "arrays"])
@pytest.mark.parametrize("kind", [ArrayRecord, MetricRecord, ConfigRecord, None])
def test_records_missing_or_of_another_kind(name: str, kind: Any) -> None:
    for cls, records, error in (
        (Request, request_records(), ConfigError),
        (Reply, reply_records(), ReplyRefused),
    ):
        if name not in records:
            continue
        right = type(records[name])
        if kind is None:
            del records[name]
        else:
            records[name] = kind()
        if kind is right and name != "geo":
            cls.from_records(records)
        elif kind is None and name == "arrays":
            assert cls.from_records(records).arrays is None
        else:
            with pytest.raises(error):
                cls.from_records(records)


def test_large_arrays_in_the_wrong_place_are_not_printed() -> None:
    records = reply_records()
    records["geo"] = ArrayRecord({"status": Array("u1", (10**6,), "geo/1", b"x" * 10**6)})
    with pytest.raises(ReplyRefused) as caught:
        Reply.from_records(records)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("protocol", [0, PROTOCOL + 1])
def test_another_protocol_says_what_to_do(protocol: int) -> None:
    with pytest.raises(ConfigError, match=r"install the same flower-geo version"):
        Request.from_records(request_records(protocol=protocol))
    with pytest.raises(ReplyRefused, match=r"install the same flower-geo version"):
        Reply.from_records(reply_records(protocol=protocol))


# -- names become folders -------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc", "a\\b", ".hidden", "-x", "a\n", "a\0b", "é", "a" * 65,
     "a b", "~", "$HOME", "../../../../etc/passwd", "．．"],
)  # fmt: skip
def test_names_that_could_leave_their_folder(name: str) -> None:
    with pytest.raises(ReplyRefused):
        Reply.from_records(reply_records(site=name))
    for key in ("run_name", "run_uid"):
        with pytest.raises(ConfigError):
            Request.from_records(request_records(**{key: name}))


@given(st.text(max_size=80))
def test_a_name_that_is_taken_is_one_plain_path_component(name: str) -> None:
    try:
        Reply.from_records(reply_records(site=name))
    except ReplyRefused:
        return
    assert name.isascii() and name[0].isalnum() and not set(name) & set("/\\\0\n ")


# -- metrics --------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, 1e30, 2**46, 10**400])
@pytest.mark.parametrize("key", ["tokens", "examples", "steps", "consumed", "eval_tokens"])
def test_counts_no_round_can_use(key: str, bad: Any) -> None:
    with pytest.raises(ReplyRefused, match=key.replace("_", "-")):
        Reply.from_records(reply_with_metrics(**{key: bad}))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e300, 10**400, [1, 2], [0.5]])
def test_other_metrics_are_finite_numbers(bad: Any) -> None:
    with pytest.raises(ReplyRefused, match="train-loss"):
        Reply.from_records(reply_with_metrics(train_loss=bad))


def test_metrics_of_odd_names_or_too_many() -> None:
    for name in ("x" * 65, "a\nb", "\x1b[2J"):
        with pytest.raises(ReplyRefused):
            Reply.from_records(reply_with_metrics(**{name: 1.0}))
    with pytest.raises(ReplyRefused, match="metrics"):
        Reply.from_records(reply_with_metrics(**{f"m{i}": 1 for i in range(1000)}))


def test_a_held_out_loss_says_over_how_many_tokens() -> None:
    with pytest.raises(ReplyRefused, match="eval-tokens"):
        Reply.from_records(reply_with_metrics(loss_before=3.0))


def test_whole_numbers_become_floats() -> None:
    reply = Reply.from_records(wire(reply_with_metrics(tokens=12, train_loss=-0.5)))
    assert reply.metrics == {"tokens": 12.0, "train-loss": -0.5}
    assert all(type(value) is float for value in reply.metrics.values())


# -- text for people ------------------------------------------------------------


@given(st.text(max_size=3000))
def test_text_from_a_site_is_one_short_printable_line(text: str) -> None:
    shown = one_line(text)
    assert len(shown) <= 500 and (shown == "" or shown.isprintable())
    assert one_line(shown) == shown


SCALARS = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=20), st.booleans(),
    st.binary(max_size=20), st.lists(st.integers(-5, 5), max_size=3),
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(sorted({*REQUEST, *REPLY, "protocol"})), SCALARS))
def test_nothing_but_the_two_errors_comes_out(changed: dict[str, Any]) -> None:
    with_request, with_reply = request_records(), reply_records()
    for records in (with_request, with_reply):
        geo = records.config_records["geo"]
        records["geo"] = ConfigRecord({**geo, **{k: v for k, v in changed.items() if k in geo}})
    try:
        Request.from_records(with_request)
    except ConfigError:
        pass
    try:
        Reply.from_records(with_reply)
    except ReplyRefused:
        pass
