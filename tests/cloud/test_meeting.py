"""Sites and the cloud's half meet at the newest step that all of them have."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flower_geo.cloud.meeting import Meeting


def test_all_begin_once_everybody_is_here() -> None:
    meeting = Meeting(["a", "b"], 60.0)
    assert not meeting.ready(1e9)
    meeting.arrive("a", [], 0.0)
    assert not meeting.ready(59.0) and meeting.missing() == {"b"}
    meeting.arrive("b", [20, 10], 59.0)
    assert meeting.ready(59.0) and meeting.step([20, 10]) == 0


def test_who_does_not_come_is_waited_for_until_the_deadline() -> None:
    meeting = Meeting(["a", "b"], 60.0)
    meeting.arrive("a", [30, 20], 100.0)
    assert not meeting.ready(159.9) and meeting.ready(160.0)
    assert meeting.missing() == {"b"} and meeting.step([20, 10]) == 20


def test_one_that_goes_again_is_waited_for_anew() -> None:
    meeting = Meeting(["a"], 10.0)
    meeting.arrive("a", [], 0.0)
    meeting.leave("a")
    assert not meeting.ready(100.0)
    meeting.arrive("a", [5], 100.0)
    assert meeting.ready(100.0) and meeting.step([5]) == 5


@given(
    st.dictionaries(st.sampled_from("abcd"), st.sets(st.integers(1, 50), max_size=3), min_size=1),
    st.sets(st.integers(1, 50), max_size=3),
)
def test_the_step_is_one_that_all_have_and_none_later_is(
    sites: dict[str, set[int]], own: set[int]
) -> None:
    meeting = Meeting(sites, 1.0)
    for site, steps in sites.items():
        meeting.arrive(site, sorted(steps), 0.0)
    step = meeting.step(own)
    everybody = [own, *sites.values()]
    assert all(step in each | {0} for each in everybody)
    assert not any(all(later in each for each in everybody) for later in range(step + 1, 51))
