"""Numbers and names made fit for people."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.observe.units import (
    format_bytes,
    format_count,
    format_loss,
    format_ratio,
    format_seconds,
    number,
    plural,
    printable,
)

anything = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers()),
    st.dictionaries(st.text(), st.none()),
)


@pytest.mark.parametrize(
    ("value", "decimal", "binary"),
    [
        (0, "0 B", "0 B"),
        (999, "999 B", "999 B"),
        (1000, "1.00 kB", "1000 B"),
        (1_310_720, "1.31 MB", "1.25 MiB"),
        (999_999, "1.00 MB", "977 KiB"),
        (19_100_000_000, "19.1 GB", "17.8 GiB"),
        (None, "–", "–"),
        (math.nan, "–", "–"),
    ],
)
def test_bytes_in_powers_of_ten_and_of_two(value: object, decimal: str, binary: str) -> None:
    assert format_bytes(value) == decimal
    assert format_bytes(value, binary=True) == binary


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.84, "0.8 s"),
        (9.96, "10 s"),
        (59.6, "1 min 00 s"),
        (185, "3 min 05 s"),
        (7800, "2 h 10 min"),
        (200_000, "2 d 07 h"),
        (-1, "–"),
        ("soon", "–"),
    ],
)
def test_seconds(seconds: object, text: str) -> None:
    assert format_seconds(seconds) == text


def test_counts_losses_ratios_and_plurals() -> None:
    assert [format_count(n) for n in (0, 9216, 1_312_896, 10**12)] == [
        "0",
        "9,216",
        "1.31 M",
        "1.00 T",
    ]
    assert [format_loss(x) for x in (8.31775, None, math.inf)] == ["8.318", "–", "–"]
    assert [format_ratio(x) for x in (1, 42.04, 1204.2)] == ["1.00×", "42.0×", "1,204×"]
    assert [plural(n, "site") for n in (1, 4)] == ["1 site", "4 sites"]


@given(anything)
def test_every_value_can_be_shown(value: object) -> None:
    for show in (format_bytes, format_count, format_loss, format_ratio, format_seconds):
        assert show(value).isprintable()
    assert number(value) is None or math.isfinite(number(value) or 0.0)


@given(anything)
def test_a_printable_name_is_one_short_line_without_control_characters(value: object) -> None:
    shown = printable(value, 30)
    assert len(shown) <= 30
    assert all(c.isprintable() or c in "\u200c\u200d" for c in shown)


def test_names_keep_their_letters_and_lose_their_tricks() -> None:
    assert printable("Universitätsspital Zürich 東京") == "Universitätsspital Zürich 東京"
    assert printable("a\x1b[2J\nb\u202egnp") == "a\ufffd[2J\ufffdb\ufffdgnp"
    assert printable("نمی\u200cشود") == "نمی\u200cشود"  # this spelling needs its joiner


def test_bool_is_no_number_and_huge_integers_are_none() -> None:
    assert number(True) is None
    assert number(10**400) is None
