"""Base, local-only and federated: as lines and on the page, whatever an event holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.observe import comparison_lines
from flower_geo.observe.comparison import compared_in, comparison_card
from flower_geo.observe.summary import summarise
from tests.observe.test_progress import drawn, plain
from tests.observe.test_report import HOSTILE, check


def event(**changes: Any) -> dict[str, Any]:
    row = {
        "site": "north", "tokens": 1200, "base": {"loss": 4.0, "accuracy": 0.1},
        "local": {"loss": 3.0, "accuracy": 0.25}, "federated": {"loss": 2.5, "accuracy": 0.5},
    }  # fmt: skip
    whole = row | {"site": "*"}
    return {"event": "comparison", "round": 3, "rows": [row, whole], "server": {}} | changes


def test_lines_tell_what_joining_brought() -> None:
    server = {"base": {"loss": 4.0}, "federated": {"loss": 4.5}}
    lines = comparison_lines(event(server=server))
    assert lines[0] == "did joining pay? loss, token accuracy on held-out data:"
    assert lines[1].split() == ["base", "local-only", "federated", "joining"]
    assert lines[2].split() == [
        "north", "4.000", "10.0%", "3.000", "25.0%", "2.500", "50.0%",
        "loss", "−0.500", "against", "local-only",
    ]  # fmt: skip
    assert lines[3].lstrip().startswith("all sites ")
    assert lines[4].lstrip().startswith("server set") and "+0.500 against base" in lines[4]
    assert len({len(line) for line in lines[1:]}) == 1


def test_without_local_only_there_is_no_column_of_it() -> None:
    row = {"site": "a", "base": {"loss": 4.0}, "federated": {"loss": 2.5, "exact_match": 0.25}}
    lines = comparison_lines(event(rows=[row]))
    assert "local-only" not in "".join(lines) and "exact match" in lines[0]
    assert "25.0%" in lines[2] and "–" in lines[2]
    page = comparison_card(event(rows=[row]))
    assert "local-baseline=true" in page and "exact match, federated" in page


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": None, "server": None}, {"rows": 3}, {"rows": [None, {}, {"site": "a"}]},
        {"rows": [{"site": "a", "base": {"loss": None}, "federated": [1]}]},
        {"server": "x", "rows": []},
    ],
)  # fmt: skip
def test_nothing_to_compare_is_no_table(changes: dict[str, Any]) -> None:
    assert comparison_lines(event(**changes)) == [] and comparison_card(event(**changes)) == ""
    assert compared_in({}) == []


def test_a_run_shows_it_everywhere() -> None:
    start = {"event": "start", "run": "x", "rounds": 3}
    lines = plain([start, {"event": "server", "round": 2, "loss": 2.25}, event()])
    assert any("loss on the server set 2.25" in line for line in lines)
    assert any("against local-only" in line for line in lines)
    assert "against local-only" in drawn([start, event()], width=120)
    assert summarise([start, event(), event(round=4)]).comparison["round"] == 4


def test_names_cannot_leave_their_cell() -> None:
    odd = event(rows=[event()["rows"][0] | {"site": HOSTILE}])
    page = comparison_card(odd)
    check(page)
    assert "<script" not in page and "<img" not in page and "\x1b" not in page
    assert "\x1b" not in "".join(comparison_lines(odd))


json = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["site", "base", "local", "federated", "loss"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(json, json)
def test_any_event_is_survived(rows: Any, server: Any) -> None:
    odd = {"event": "comparison", "rows": rows, "server": server}
    comparison_lines(odd)
    comparison_card(odd)
