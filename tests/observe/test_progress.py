"""Progress is one line a round where nobody watches, and a steady display where somebody does."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from flower_geo.observe import Progress
from tests.observe.fake_run import fake_events


def plain(events: list[dict[str, Any]], **options: Any) -> list[str]:
    console = Console(file=io.StringIO(), width=80)
    with Progress(console, **options) as progress:
        for event in events:
            progress.update(event)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def drawn(events: list[dict[str, Any]], width: int = 100) -> str:
    """The display as it stands after these events, without colours."""
    console = Console(file=io.StringIO(), width=width)
    progress = Progress(console, live=True)
    for event in events:
        progress.update(event)
    console.print(progress._state.render())
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_line_a_round_without_colours_or_wrapping() -> None:
    lines = plain(fake_events(sites=4, rounds=5, troubles=False))
    rounds = [line for line in lines if line.startswith("round ")]
    assert len(rounds) == 5
    assert rounds[1].startswith("round 2/5  sites 4/4  train loss 8.")
    for part in ("tokens/s", "up 25", "down 5.34 MB", "took 3", "left 1 min"):
        assert part in rounds[1], part
    assert "left" not in rounds[4]
    assert lines[0].startswith("start: four-institutions · DiLoCo · gpt2-nano (1.31 M parameters)")
    assert lines[-1].startswith("completed after 5 rounds in ")
    assert "\x1b" not in "".join(lines)


def test_troubles_get_a_line_each() -> None:
    text = "\n".join(plain(fake_events()))
    assert "Mayo Clinic missing in round 6: no answer by the deadline" in text
    assert "AIIMS Delhi refused in round 12: update norm 48.1" in text
    assert "resume after round 12" in text
    ended = plain(fake_events(rounds=1, ended="failed"))[-1]
    assert ended.endswith("only 1 of 4 sites answered in 3 attempts")


def test_waiting_is_not_printed_but_drawn() -> None:
    start = {"event": "start", "run": "r", "sites": ["a", "b", "c"], "rounds": 4}
    waiting = {"event": "waiting", "round": 1, "answered": ["a"], "pending": ["b", "c"]}
    assert plain([start, waiting]) == ["start: r · 3 sites"]
    assert "round 1 1 of 3 sites answered" in drawn([start, waiting])
    assert "waiting for b, c" in drawn([start, waiting])
    assert "waiting for c" in drawn([start, waiting, {"event": "site", "round": 1, "site": "b"}])


def test_sites_that_connect_after_the_start_are_named() -> None:
    events: list[dict[str, Any]] = [
        {"event": "start", "run": "r"},
        {"event": "sites", "sites": ["a", "b"]},
        {"event": "fault", "site": "", "what": "no greeting", "detail": "timed out"},
    ]
    assert plain(events) == ["start: r", "  2 sites: a, b", "  no greeting: timed out"]
    assert "0 of 2 sites answered; waiting for a, b" in re.sub(r", [\d.]+ s", "", drawn(events))


def test_the_display_counts_sites_anew_each_round_and_sums_bytes() -> None:
    events = fake_events(sites=4, rounds=8, troubles=False)
    cut = max(i for i, e in enumerate(events) if e["event"] == "round" and e["round"] == 5)
    shown = drawn(events[: cut + 1])
    assert "round 5 of 8" in shown
    assert "round 6 0 of 4 sites answered" in shown
    assert re.search(r"down 26\.7 MB", shown)  # five rounds of 5.34 MB
    assert re.search(r"1 min \d\d s left", shown)


def test_the_display_fits_32_sites_and_a_narrow_terminal() -> None:
    names = [f"institution-with-a-long-name-{i}" for i in range(32)]
    start = {"event": "start", "run": "r", "sites": names}
    shown = drawn([start, {"event": "waiting", "round": 1, "answered": [], "pending": names}])
    assert "and 28 more" in " ".join(shown.split())
    assert all(len(line) <= 40 for line in drawn([start], width=40).splitlines())


def test_names_cannot_write_to_the_terminal() -> None:
    evil = "x\x1b[2J\x1b]0;gone\x07\r[red]"
    events: list[dict[str, Any]] = [
        {"event": "start", "run": evil, "sites": [evil], "model": evil},
        {"event": "waiting", "round": 1, "pending": [evil]},
        {"event": "site", "round": 1, "site": evil, "status": "refused", "reason": evil},
        {"event": "fault", "what": evil, "site": evil, "detail": evil},
        {"event": "end", "status": evil, "reason": evil},
    ]
    for text in ("\n".join(plain(events)), drawn(events)):
        assert not set("\x1b\x07\r") & set(text)
        assert "[red]" in text  # no markup either


@pytest.mark.parametrize("force", [False, True])
def test_a_file_is_no_terminal_even_where_colours_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, force: bool
) -> None:
    if force:
        monkeypatch.setenv("FORCE_COLOR", "1")
    lines = plain(fake_events(sites=1, rounds=2))
    assert sum(line.startswith("round ") for line in lines) == 2
    assert "\x1b[?25l" not in "".join(lines)  # no hidden cursor


def test_a_live_display_starts_redraws_and_gives_the_cursor_back() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    progress = Progress(console, live=True)
    with pytest.raises(RuntimeError, match="boom"), progress:
        for event in fake_events(sites=2, rounds=3):
            progress.update(event)
        progress.note("a line above")
        raise RuntimeError("boom")
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\x1b[?25l" in text
    assert text.rstrip("\n").endswith("\x1b[?25h")
    assert "a line above" in text
    assert "completed after 3 rounds" in text


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(),
    st.integers(),
    st.text(max_size=5),
    st.lists(st.one_of(st.none(), st.text(max_size=3), st.integers()), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)
KEYS = [
    *("time", "run", "strategy", "rounds", "model", "parameters", "sites", "resumed_from"),
    *("round", "site", "status", "loss", "train_loss", "answered", "pending", "asked"),
    *("accepted", "seconds", "bytes_up", "tokens_per_second", "what", "detail", "reason"),
]
KINDS = st.sampled_from(
    ["start", "waiting", "site", "round", "eval", "fault", "end", "sites", "new", None, 3]
)


@given(
    events=st.lists(st.dictionaries(st.sampled_from(["event", *KEYS]), VALUES), max_size=6)
    | st.lists(
        st.fixed_dictionaries({"event": KINDS}, optional=dict.fromkeys(KEYS, VALUES)), max_size=8
    ),
    total=st.none() | st.integers(0, 5),
)
def test_no_event_can_stop_it(events: list[dict[str, Any]], total: int | None) -> None:
    plain(events, total_rounds=total)
    drawn(events)
