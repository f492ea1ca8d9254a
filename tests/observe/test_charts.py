"""Scales are right, gaps stay gaps, colours can be told apart."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from importlib.resources import files
from itertools import combinations
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from flower_geo.observe.charts import COLOURS, Series, legend, line_chart, linear_scale, log_scale
from flower_geo.observe.units import format_loss

finite = st.floats(-1e6, 1e6)


def chart(series: list[Series], **options: Any) -> str:
    words = {"title": "t", "summary": "s.", "x_label": "round", "y_label": "loss, nats"}
    return line_chart(series, y_format=format_loss, **{**words, **options})


def curves(html: str) -> list[str]:
    return re.findall(r'<path class="curve" d="([^"]*)"', html)


@example(0.0, 5e-324)
@example(6.0, -5e-324)
@given(finite, finite)
def test_a_linear_scale_covers_its_values_with_round_ticks(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    scale = linear_scale(low, high)
    assert scale.low <= low
    assert scale.high >= high
    assert 2 <= len(scale.ticks) <= 9
    assert scale.at(scale.low) == 0
    assert scale.at(scale.high) == 1
    gaps = [y - x for x, y in zip(scale.ticks, scale.ticks[1:], strict=False)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-3)


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_rounds_get_whole_ticks_within_the_data(a: int, b: int) -> None:
    low, high = min(a, b), max(a, b)
    scale = linear_scale(low, high, 6, whole=True)
    assert scale.ticks
    assert all(tick == int(tick) and low <= tick <= high for tick in scale.ticks)


@given(st.floats(1e-3, 1e15), st.floats(1e-3, 1e15))
def test_a_log_scale_covers_its_values_with_decades(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    scale = log_scale(low, high)
    assert -1e-9 <= scale.at(low) <= scale.at(high) <= 1 + 1e-9
    assert all(math.log10(tick) == pytest.approx(round(math.log10(tick))) for tick in scale.ticks)
    assert len(scale.ticks) >= 2


def test_a_line_is_drawn_where_its_values_lie() -> None:
    (line,) = curves(chart([Series("a", [(0, 10.0), (5, 5.0), (10, 0.0)])]))
    assert line == "M0.0 0.0L500.0 500.0L1000.0 1000.0"


@pytest.mark.parametrize("gap", [None, math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_breaks_the_line(gap: float | None) -> None:
    html = chart([Series("a", [(0, 4.0), (1, 3.0), (2, gap), (3, 2.0), (4, 1.0)])])
    (line,) = curves(html)
    assert line.count("M") == 2
    assert line.count("L") == 2
    assert "nan" not in html.lower()
    assert html.count('class="point"') == 4


def test_a_log_chart_leaves_out_what_is_not_positive() -> None:
    html = chart([Series("a", [(0, 0.0), (1, -5.0), (2, 10.0), (3, 100.0)])], log=True)
    assert curves(html) == ["M0.0 1000.0L1000.0 0.0"]


def test_nothing_known_gives_a_plain_word_instead_of_a_chart() -> None:
    for points in ([], [(0.0, None)], [(1.0, math.nan)]):
        html = chart([Series("a", points)])
        assert "<svg" not in html
        assert "Nothing recorded yet" in html
    assert "<svg" not in chart([])


def test_a_single_point_and_a_flat_line_can_be_drawn() -> None:
    assert curves(chart([Series("a", [(1, 8.3)])])) == ["M500.0 500.0"]
    assert len(curves(chart([Series("a", [(0, 2.0), (9, 2.0)])]))) == 1


def test_a_long_line_is_thinned_but_keeps_its_peaks_and_gaps() -> None:
    points: list[tuple[float, float | None]] = [(i, 1.0) for i in range(20_000)]
    points[12_345] = (12_345, 99.0)
    points[5_000:6_000] = [(i, None) for i in range(5_000, 6_000)]
    (line,) = curves(chart([Series("a", points)]))
    assert line.count("L") < 450
    assert line.count("M") == 2
    assert " 10.0L" in line  # the peak: 99 on an axis that ends at 100


def test_hostile_names_cannot_leave_their_attribute() -> None:
    name = "\"><script>alert(1)</script><g x='"
    html = chart([Series(name, [(0, 1.0), (1, 2.0)])], title=name, summary=name, x_label=name)
    assert "<script" not in html + legend([Series(name, [])])
    root = ElementTree.fromstring(html)  # well-formed
    group = next(g for g in root.iter("g") if "data-name" in g.attrib)
    assert group.attrib["data-name"] == name
    assert json.loads(group.attrib["data-points"]) == [[0, 0, 100, "1.000"], [1, 100, 0, "2.000"]]


def test_a_screen_reader_gets_title_and_summary() -> None:
    html = chart([Series("a", [(0, 1.0)])], title="Loss & more", summary="It fell.")
    found = re.search(r'role="img" aria-label="([^"]*)"', html)
    assert found is not None
    assert unescape(found[1]) == "Loss & more. It fell."


# -- colours ---------------------------------------------------------------------


def themes() -> dict[str, dict[str, str]]:
    css = files("flower_geo.observe").joinpath("report.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.S)[:2]
    read = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", light))
    return {"light": read, "dark": read | dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", dark))}


def linear(colour: str) -> list[float]:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]


def contrast(a: str, b: str) -> float:
    weights = (0.2126, 0.7152, 0.0722)
    one, two = (sum(w * p for w, p in zip(weights, linear(c), strict=True)) for c in (a, b))
    return (max(one, two) + 0.05) / (min(one, two) + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast_is_enough_for_lines_and_for_text(theme: str) -> None:
    colours = themes()[theme]
    for i in range(COLOURS):
        assert contrast(colours[f"c{i}"], colours["card"]) >= 3, i  # WCAG 2.2, 1.4.11
    for ink in ("ink", "soft", "accent", "good", "warn", "bad"):
        assert contrast(colours[ink], colours["card"]) >= 4.5, ink  # WCAG 2.2, 1.4.3
        assert contrast(colours[ink], colours["page"]) >= 4.5, ink


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
SIGHT: dict[str, list[list[float]]] = {
    "full": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protan": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deutan": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}


def lab(rgb: list[float]) -> tuple[float, float, float]:
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [max(0.0, sum(m * p for m, p in zip(row, rgb, strict=True))) for row in rows]
    f = [
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (v / w for v, w in zip(xyz, white, strict=True))
    ]
    return 116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_no_two_series_look_the_same_to_a_colour_blind_reader(theme: str, sight: str) -> None:
    colours = themes()[theme]
    seen = []
    for i in range(COLOURS):
        rgb = linear(colours[f"c{i}"])
        seen.append(
            lab([sum(m * p for m, p in zip(row, rgb, strict=True)) for row in SIGHT[sight]])
        )
    near = {(i, j): math.dist(seen[i], seen[j]) for i, j in combinations(range(COLOURS), 2)}
    assert min(near.values()) > 15, near
