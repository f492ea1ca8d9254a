"""Calls and answers refuse what the other side could not read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.calls import KINDS, MAX_BLOBS, MAX_META, Answer, Call, pack_meta, read_meta
from flower_geo.errors import FrameRefused

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(), JSON, max_size=6))
def test_meta_comes_back_to_the_bit(meta: dict) -> None:
    assert read_meta(pack_meta(meta)) == meta


@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind: str) -> None:
    assert Call(kind, 0).meta == {}


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "pull"},
        {"step": -1},
        {"step": 2**53 + 1},
        {"micro": -1},
        {"micro": 2**31 + 1},
        {"meta": {"x": object()}},
        {"meta": {"loss": float("nan")}},
        {"meta": {"x": "a" * MAX_META}},
        {"blobs": {"": b""}},
        {"blobs": {"a\n": b""}},
        {"blobs": {"n" * 300: b""}},
        {"blobs": {str(n): b"" for n in range(MAX_BLOBS + 1)}},
    ],
    ids=range(12),
)
def test_what_no_call_can_be(values: dict) -> None:
    with pytest.raises(FrameRefused) as caught:
        Call(**{"kind": "step", "step": 1} | values)
    assert "\n" not in str(caught.value)
    assert caught.value.fault == "site"
    assert not caught.value.retry


def test_an_answer_is_checked_too() -> None:
    with pytest.raises(FrameRefused, match="JSON"):
        Answer({"x": float("inf")})
    with pytest.raises(FrameRefused, match="name"):
        Answer({}, {"": b""})


@pytest.mark.parametrize(
    "text",
    [b"[]", b"1", b"{", b"\xff", b'{"x":NaN}', b'{"x":Infinity}', b'{"x":' + b"[" * 60_000,
     b'{"x":"' + b"a" * MAX_META + b'"}'],
    ids=range(8),
)  # fmt: skip
def test_meta_that_is_none(text: bytes) -> None:
    with pytest.raises(FrameRefused):
        read_meta(text)


def test_no_meta_is_an_empty_one() -> None:
    assert read_meta(b"") == {}
