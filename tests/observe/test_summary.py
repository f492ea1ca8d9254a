"""Loss figures follow the weights that were kept, byte figures follow the network."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.observe.baselines import baseline_bytes, compare
from flower_geo.observe.summary import ends_of, summarise
from tests.observe.fake_run import fake_events


def site(round_: int, name: str, status: str = "accepted", **keys: Any) -> dict[str, Any]:
    keys = {"tokens": 100, "steps": 5, "bytes_up": 10, "bytes_down": 20, **keys}
    return {"event": "site", "round": round_, "site": name, "status": status, **keys}


def test_an_undisturbed_run_adds_up() -> None:
    run = summarise(fake_events(sites=3, rounds=4, troubles=False))
    assert [row.round for row in run.rounds] == [1, 2, 3, 4]
    assert run.status == "completed"
    assert run.incarnations == 1
    assert list(run.held_out) == [0, 1, 2, 3, 4]
    for one in run.sites.values():
        assert (one.rounds_answered, one.rounds_asked) == (4, 4)
        assert one.tokens == 4 * 20 * 8 * 128
        assert one.not_accepted == {}
        assert list(one.held_out) == [0, 1, 2, 3, 4]
    assert sum(row.bytes_up for row in run.rounds) == sum(s.bytes_up for s in run.sites.values())
    assert sum(row.steps for row in run.rounds) == 4 * 3 * 20


def test_troubles_are_counted_by_site_and_by_kind() -> None:
    run = summarise(fake_events(sites=4, rounds=24))
    told = {name: one.not_accepted for name, one in run.sites.items()}
    assert list(told.values()) == [{}, {"missing": 3}, {"late": 1}, {"refused": 1}]
    assert run.incarnations == 2
    assert [f.what for f in run.faults] == ["site lost", "reply refused", "coordinator restarted"]
    assert run.seconds is not None
    assert run.first_time is not None
    assert run.last_time is not None
    down = run.last_time - run.first_time - run.seconds
    assert down == pytest.approx(75, abs=0.1)  # the fake coordinator was away so long


def test_a_round_done_again_counts_once_in_losses_and_twice_in_bytes() -> None:
    start = {"event": "start", "incarnation": 1, "parameters": 1000, "inner_steps": 5}
    done = {"event": "round", "round": 1, "accepted": 2, "asked": 2, "train_loss": 7.0}
    events = [
        start,
        site(1, "a"),
        site(1, "b"),
        done,
        site(2, "a", train_loss=9.0),
        {"event": "round", "round": 2, "accepted": 1, "train_loss": 9.0},
        {"event": "eval", "round": 2, "site": "*", "loss": 9.0},
        {**start, "incarnation": 2, "resumed_from": 1},
        site(2, "a", train_loss=5.0),
        site(2, "b", train_loss=6.0),
        {"event": "round", "round": 2, "accepted": 2, "train_loss": 5.5},
        {"event": "eval", "round": 2, "site": "*", "loss": 5.4},
    ]
    run = summarise(events)
    assert [row.train_loss for row in run.rounds] == [7.0, 5.5]
    assert run.held_out == {2: 5.4}
    assert run.sites["a"].train_loss == {1: None, 2: 5.0}
    assert run.sites["a"].tokens == 200
    assert (run.sites["a"].bytes_up, run.sites["b"].bytes_up) == (30, 20)
    totals = baseline_bytes(events)
    assert totals["sent"] == 5 * 30
    assert totals["fp32_fedavg"] == 4 * 2 * 4 * 1000
    assert totals["per_step_gradients"] == 20 * 2 * 4 * 1000
    assert totals["fp32_fedavg_ratio"] == pytest.approx(32_000 / 150)


def test_figures_of_rounds_that_were_never_committed_are_dropped_on_resume() -> None:
    run = summarise(
        [
            {"event": "start"},
            {"event": "round", "round": 1, "train_loss": 7.0, "bytes_up": 4},
            {"event": "round", "round": 2, "train_loss": 6.0, "bytes_up": 4},
            {"event": "eval", "round": 2, "site": "*", "loss": 6.0},
            {"event": "start", "resumed_from": 1},
        ]
    )
    assert [(row.round, row.train_loss, row.bytes_up) for row in run.rounds] == [
        (1, 7.0, 4),
        (2, None, 4),
    ]
    assert run.held_out == {}
    assert run.status == "running"


def test_one_question_told_of_twice_counts_its_bytes_once() -> None:
    late = site(1, "a", "late", bytes_up=10, bytes_down=20)
    run = summarise([site(1, "a", "missing", bytes_up=0), late])
    assert (run.sites["a"].bytes_up, run.sites["a"].bytes_down) == (10, 20)
    assert run.sites["a"].not_accepted == {"late": 1}


def test_another_attempt_is_sent_again_and_its_outcome_counts() -> None:
    run = summarise([site(1, "a", attempt=1), site(1, "a", "missing", attempt=2, bytes_up=0)])
    assert run.sites["a"].status == {1: "missing"}
    assert run.sites["a"].bytes_down == 40
    assert run.sites["a"].rounds_answered == 0


def test_the_fuller_of_two_byte_counts_is_taken() -> None:
    short = {"event": "round", "round": 1, "bytes_up": 5, "bytes_down": 90}
    (row,) = summarise([site(1, "a"), site(1, "b"), short]).rounds
    assert (row.bytes_up, row.bytes_down) == (20, 90)


def test_a_round_that_does_not_name_its_attempt_means_the_newest() -> None:
    events = [
        site(1, "a", attempt=1),
        site(1, "b", "missing", attempt=1, bytes_up=0),
        site(1, "b", attempt=2),
        {"event": "round", "round": 1, "accepted": 2, "bytes_up": 12, "bytes_down": 20},
    ]
    (row,) = summarise(events).rounds
    assert (row.bytes_up, row.bytes_down) == (10 + 12, 40 + 20)


def test_sites_are_known_from_the_moment_they_connect() -> None:
    run = summarise([{"event": "start"}, {"event": "sites", "sites": ["a", "b"]}])
    assert list(run.sites) == ["a", "b"]
    fault = {"event": "fault", "site": "", "what": "no greeting"}
    assert summarise([fault]).faults[0].site is None


def test_without_steps_or_size_a_baseline_is_unknown_not_zero() -> None:
    totals = baseline_bytes([{"event": "round", "round": 1, "accepted": 2, "bytes_up": 5}])
    assert totals["sent"] == 5
    assert totals["fp32_fedavg"] is None
    assert totals["per_step_gradients_ratio"] is None
    assert baseline_bytes([])["fp32_fedavg_ratio"] is None
    with_size = baseline_bytes(
        [
            {"event": "start", "parameters": 10, "inner_steps": 3},
            {"event": "round", "round": 1, "accepted": 2},
        ]
    )
    assert with_size["fp32_fedavg"] == 160
    assert with_size["per_step_gradients"] == 480
    assert with_size["fp32_fedavg_ratio"] is None  # nothing sent: no ratio, no division


def test_the_curve_of_a_site_falls_back_on_what_the_site_saw() -> None:
    run = summarise([site(1, "a", loss_before=8.0), site(2, "a", loss_before=7.0)])
    assert run.sites["a"].curve == {0: 8.0, 1: 7.0}
    assert ends_of(run.sites["a"].curve) == (8.0, 7.0)
    assert ends_of({1: None}) is None


KEYS = [
    "round",
    "site",
    "attempt",
    "sites",
    "bytes_up",
    "loss",
    "status",
    "resumed_from",
    "accepted",
]
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([10**400, -1, 1e308]),
    st.floats(),
    st.sampled_from(["a", "*", ""]),
    st.lists(st.one_of(st.none(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {"event": st.sampled_from(["start", "site", "round", "eval", "fault", "end", "new", None])},
        optional={key: VALUES for key in [*KEYS, "time", "parameters", "inner_steps", "what"]},
    ),
    max_size=12,
)


@given(EVENTS)
def test_no_event_makes_it_stumble(events: list[dict[str, Any]]) -> None:
    run = summarise(events)
    totals = baseline_bytes(events)
    assert totals["sent"] >= 0
    assert [row.round for row in run.rounds] == sorted({row.round for row in run.rounds})


def test_bytes_sent_for_the_last_evaluation_count_too() -> None:
    run = summarise(
        [
            {"event": "site", "round": 1, "site": "a", "status": "accepted", "bytes_down": 7},
            {"event": "round", "round": 1, "bytes_up": 5, "bytes_down": 7},
            {"event": "evaluation", "round": 1, "site": "a", "bytes_down": 11},
        ]
    )
    assert run.bytes_evaluation == 11 and run.sites["a"].bytes_down == 18
    assert run.rounds[0].bytes_down == 7
    assert compare(run)["sent_down"] == 18


def test_answers_that_did_not_count_are_kept_with_their_reasons() -> None:
    def line(status: str, reason: str | None) -> dict[str, Any]:
        return {"event": "site", "site": "a", "round": 3, "status": status, "reason": reason}

    run = summarise(
        [
            line("refused", "its norm is 40 times the usual"), line("late", "dropped: too late"),
            line("missing", "no reply before the deadline"), line("accepted", None),
            line("failed", None),
        ]
    )  # fmt: skip
    assert [(f.round, f.site, f.what, f.detail) for f in run.turned_down] == [
        (3, "a", "refused", "its norm is 40 times the usual"),
        (3, "a", "late", "dropped: too late"),
    ]
