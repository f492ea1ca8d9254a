"""Adaptive choice: lines measured from round trips, and one step at a time on the ladder."""

from __future__ import annotations

import itertools
import json
import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_geo.compression import codec
from flower_geo.compression.adaptive import AdaptiveChoice, Budget, encoded_bytes, ladder
from flower_geo.compression.link import Link
from flower_geo.errors import CodecSpecError

RUNGS = ladder("bf16 > int8(block=256) > int4(block=64) > topk(density=0.05,chunk=4096)|int4")
SHAPES = {"w": (1000, 1000)}
SIZES = [encoded_bytes(spec, SHAPES) for spec in RUNGS]


# -- the ladder -----------------------------------------------------------------


def test_a_ladder_is_read_to_canonical_specs() -> None:
    assert ladder(" bf16>int8 > *.bias=bf16; *=int4(block=64)") == (
        "bf16", "int8(block=256)", "*.bias=bf16; *=int4(block=64)",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [("int8", "no rung to step to"), ("", "rung 1"), ("int8 > int8(block=256)", "twice"),
     ("bf16 > imt8(block=64)", "rung 2 of the ladder: codec 'imt8' is not known, did you mean"),
     ("bf16 > int8(blok=64)", "'blok', did you mean 'block'"), ("bf16 > > int8", "rung 2")],
)  # fmt: skip
def test_a_ladder_with_a_typo(text: str, words: str) -> None:
    with pytest.raises(CodecSpecError) as caught:
        ladder(text)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_ladder_out_of_order_is_refused_with_both_sizes() -> None:
    with pytest.raises(CodecSpecError, match=r"from int4\(block=64\) to bf16, which sends more"):
        AdaptiveChoice(ladder("int4 > bf16"), Budget(10.0), SHAPES)


@pytest.mark.parametrize("spec", RUNGS)
def test_sizes_are_told_before_anything_is_encoded(spec: str) -> None:
    shapes = {"a": (333, 700), "b": (5,), "c": (), "d": (0, 3)}
    generator = torch.Generator().manual_seed(5)
    real = sum(
        len(codec(spec).encode(torch.randn(shape, generator=generator)))
        for shape in shapes.values()
    )
    assert encoded_bytes(spec, shapes) == pytest.approx(real, rel=0.01)


def test_rules_are_sized_by_name() -> None:
    rules = "*.bias=fp32; *=int4(block=64)"
    assert encoded_bytes(rules, {"x.bias": (9000,)}) > 7 * encoded_bytes(rules, {"x": (9000,)})


def test_a_budget_is_seconds_or_a_share() -> None:
    assert Budget.read("10").each_way(None) == 5.0
    # 20 % of a round is a quarter of what the other 80 % take, half of that each way
    assert Budget.read("20%").each_way(80.0) == pytest.approx(10.0)
    assert Budget.read("20%").each_way(None) is None


# -- the line -------------------------------------------------------------------


def speeds(link: Link) -> tuple[float, float]:
    up, down = link.speed(0), link.speed(1)
    assert up is not None and down is not None
    return up, down


def test_both_ways_are_told_apart_from_one_number_a_round() -> None:
    link = Link()
    link.empty(4.0)
    for round_ in range(30):
        up, down = 10e6 if round_ % 3 else 3e6, 8e6 * (round_ > 0)
        link.observe(up, down, 4.0 + up / 1e6 + down / 5e6)
    assert speeds(link) == pytest.approx((1e6, 5e6), rel=0.2)


def test_polls_that_jitter_do_not_move_it_much() -> None:
    link, rng = Link(), random.Random(3)
    link.empty(5.0)
    found = []
    for _ in range(40):
        link.observe(20e6, 20e6, 4.0 + 20 + 4 + rng.uniform(0, 3))
        found.append(link.seconds(0, 20e6) or 0.0)
    # what stays the same is the sum; the parts are as first thought, half and half
    total = (link.seconds(0, 20e6) or 0.0) + (link.seconds(1, 20e6) or 0.0)
    assert total == pytest.approx(24.5, rel=0.1)
    assert max(found[10:]) / min(found[10:]) < 1.3


def test_one_accident_is_not_believed_and_two_are() -> None:
    def after(*trips: float) -> float:
        link = Link()
        for seconds in (10.0,) * 8 + trips:
            link.observe(10e6, 0, seconds)
        return 10e6 / speeds(link)[0]

    assert after() == pytest.approx(10.0)
    assert after(300.0) < 20 and after(300.0, 10.0) < 17
    assert after(300.0, 10.0, 10.0, 10.0) == pytest.approx(10.0, rel=0.15)
    assert after(300.0, 300.0) == pytest.approx(300.0, rel=0.15)
    # and a faster one the same way, only that a line cannot be faster than infinitely
    assert after(1.0, 1.0, 1.0, 1.0, 1.0, 1.0) == pytest.approx(1.0, rel=0.5)


def test_the_greeting_tells_what_no_payload_costs() -> None:
    link = Link()
    link.empty(6.0)
    link.empty(60.0)  # only the first greeting counts
    link.observe(10e6, 0, 16.0)
    assert speeds(link)[0] == pytest.approx(1e6)
    without = Link()
    without.observe(10e6, 0, 16.0)
    assert speeds(without)[0] == pytest.approx(10e6 / 16)


@pytest.mark.parametrize("seed", range(8))
def test_an_overhead_the_greeting_did_not_show_is_not_taken_for_a_slow_line(seed: int) -> None:
    """Fewer bytes that take as long: a busy machine, not the line."""
    link, rng = Link(), random.Random(seed)
    link.empty(5.0)
    link.observe(750e3, 0, 15.0 + rng.uniform(0, 3))
    believed = 750e3 / speeds(link)[0]
    assert believed > 8
    for _ in range(3):
        link.observe(140e3, 140e3, 15.0 + rng.uniform(0, 3))
    assert link.overhead is not None and link.overhead > 8.5
    for _ in range(3):
        link.observe(750e3, 140e3, 15.0 + rng.uniform(0, 3))
    assert 750e3 / speeds(link)[0] < believed / 2


def test_a_busy_machine_later_on_is_told_from_a_slow_line_by_stepping_down() -> None:
    """Both look alike until fewer bytes are sent; then only the line gets faster."""
    for overhead, slow in ((25.0, 1.0), (5.0, 6.0)):
        link = Link()
        link.empty(5.0)
        for _ in range(6):
            link.observe(4e6, 0, 5.0 + 4.0)
        for _ in range(3):
            link.observe(4e6, 0, overhead + 4.0 * slow)
        assert (link.seconds(0, 4e6) or 0.0) > 12  # the line is believed first
        for sent in (2e6, 1e6, 0.5e6, 0.5e6, 0.5e6):
            link.observe(sent, 0, overhead + sent / 1e6 * slow)
        assert link.overhead is not None
        assert (link.overhead > 17) == (slow == 1.0), link
        assert ((link.seconds(0, 4e6) or 0.0) < 20) == (slow == 1.0), link


def test_a_direction_not_seen_yet_is_thought_to_be_alike() -> None:
    link = Link()
    assert link.speed(0) is None and link.seconds(1, 5) is None
    link.observe(10e6, 0, 10.0)
    assert speeds(link) == pytest.approx((1e6, 1e6))
    link.observe(10e6, 10e6, 10.5)
    assert speeds(link)[0] == pytest.approx(1e6, rel=0.2)
    assert speeds(link)[1] > 3e6


def test_speeds_by_hand_win_and_tell_the_other_way_exactly() -> None:
    link = Link(declared=[2e6, None])
    link.observe(10e6, 10e6, 105.0)  # five of them went up
    assert speeds(link)[0] == 2e6 and speeds(link)[1] == pytest.approx(1e5)
    both = Link(declared=[2e6, 3e6])
    both.observe(10e6, 10e6, 105.0)
    assert speeds(both) == (2e6, 3e6) and both.slow == []


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1e12), st.floats(0, 1e12),
            st.floats(allow_nan=True, allow_infinity=True),
        ), max_size=30,
    )
)  # fmt: skip
@settings(max_examples=150)
def test_nothing_observed_breaks_it(trips: list[tuple[float, float, float]]) -> None:
    link = Link()
    for up, down, seconds in trips:
        link.observe(up, down, seconds)
    numbers = [*link.slow, *(number for row in link.spread for number in row)]
    assert all(math.isfinite(number) for number in numbers)
    assert all(slow > 0 for slow in link.slow)


# -- the choice -----------------------------------------------------------------


def chooser(target: str = "10", quantile: float = 0.0) -> AdaptiveChoice:
    return AdaptiveChoice(RUNGS, Budget.read(target), SHAPES, quantile)


def play(choice: AdaptiveChoice, site: str, up: float, rounds: int) -> list[int]:
    """Rungs a site stands on after each of so many rounds at this speed, nothing sent down."""
    seen = []
    for _ in range(rounds):
        sent = SIZES[RUNGS.index(choice.up(site))]
        choice.observe(site, sent, 0, sent / up, work=30.0)
        choice.settle()
        seen.append(RUNGS.index(choice.up(site)))
    return seen


def test_it_begins_in_the_middle_and_goes_a_step_at_a_time() -> None:
    choice = chooser()
    assert choice.up("a") == RUNGS[2] and choice.down == RUNGS[2]
    assert play(choice, "a", up=SIZES[0], rounds=3) == [1, 0, 0]  # bf16 in one second of five
    # int8 takes 14 seconds of 5, int4 seven: down to the sparse one, and it stays
    slow = play(choice, "a", up=SIZES[1] / 14, rounds=8)
    assert slow == sorted(slow) and slow[-1] == 3
    assert all(abs(b - a) <= 1 for a, b in zip([0, *slow], slow, strict=False))
    assert "of its time" in choice.why("a") or choice.why("a") == ""


def test_back_up_takes_two_rounds_or_a_clear_margin() -> None:
    at = SIZES[2] / 5 / 1.3  # int4 takes 1.3 of its time: no reason to leave the sparse one
    choice = chooser()
    choice.greet("a", 0.0)
    assert play(choice, "a", up=SIZES[1] / 20, rounds=4)[-1] == 3
    assert play(choice, "a", up=at, rounds=12).count(2) <= 3  # tried again now and then
    # 0.7 of its time: two rounds in a row, once the line is known to be faster
    moved = play(choice, "a", up=SIZES[2] / 5 / 0.7, rounds=12)
    assert moved[-1] == 2
    # between comfort and the limit nothing moves, so nothing swings to and fro
    assert set(play(choice, "a", up=SIZES[2] / 5 / 0.9, rounds=12)) == {2}


def test_a_line_that_swings_does_not_take_the_codec_along() -> None:
    choice, rng = chooser(), random.Random(1)
    play(choice, "a", up=SIZES[1] / 4, rounds=8)  # int8 takes 0.8
    seen = [play(choice, "a", up=SIZES[1] / 4 * rng.uniform(0.9, 1.25), rounds=1)[0]
            for _ in range(40)]  # fmt: skip
    assert sum(a != b for a, b in itertools.pairwise(seen)) <= 4


def test_a_share_of_the_round_follows_the_work() -> None:
    choice = chooser("20%")
    for work, rung in ((300.0, 1), (75.0, 3)):  # 37 seconds each way, then 9
        for _ in range(8):
            sent = SIZES[RUNGS.index(choice.up("a"))]
            choice.observe("a", sent, 0, sent / (SIZES[1] / 25.0), work=work)
            choice.settle()
        assert choice.up("a") == RUNGS[rung]


def test_a_try_that_is_undone_is_made_less_and_less_often() -> None:
    choice, tries = chooser("60"), []
    choice.greet("a", 4.0)
    at = 3
    for round_ in range(60):
        sent = SIZES[RUNGS.index(choice.up("a"))]
        trip = 4.0 + sent / (SIZES[2] / 48)  # int4 takes 48 seconds of 30
        choice.observe("a", sent, 0, trip, work=30.0)
        choice.settle()
        now = RUNGS.index(choice.up("a"))
        if now < at and round_ > 3:
            tries.append(round_)
        at = now
    assert len(tries) <= 4


@pytest.mark.parametrize("seed", range(4))
def test_a_fast_line_on_a_busy_machine_ends_at_the_top(seed: int) -> None:
    """The greeting was quicker than a round ever is; the payload is small beside the noise."""
    choice, rng = chooser("20%"), random.Random(seed)
    choice.greet("a", 5.0)
    down = 0
    for _ in range(25):
        sent = SIZES[RUNGS.index(choice.up("a"))]
        choice.observe("a", sent, down, 6.0 + (sent + down) / 1e9 + rng.uniform(0, 4), work=20.0)
        choice.settle()
        down = SIZES[RUNGS.index(choice.down)]
    assert (choice.up("a"), choice.down) == (RUNGS[0], RUNGS[0])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("line", "rungs"), [(20e6, {1, 2}), (5e6, {3})])
def test_a_large_model_on_a_line_of_its_own_speed(seed: int, line: float, rungs: set[int]) -> None:
    """A thousand million weights and 75 seconds each way; the two ways look the same."""
    shapes = {f"w{i}": (1000, 1000) for i in range(1000)}
    choice, rng = AdaptiveChoice(RUNGS, Budget.read("20%"), shapes), random.Random(seed)
    choice.greet("a", 5.0)
    down = 0
    for round_ in range(25):
        sent = choice.sizes[RUNGS.index(choice.up("a"))]
        trip = 6.0 + (sent + down) / line + rng.uniform(0, 3)
        choice.observe("a", sent, down, trip, work=600.0)
        choice.settle()
        down = choice.sizes[RUNGS.index(choice.down)]
        if round_ > 8:
            assert {RUNGS.index(choice.up("a")), RUNGS.index(choice.down)} <= rungs


def test_speeds_by_hand_choose_before_the_first_round() -> None:
    choice = chooser()
    choice.greet("fast", 1.0, up=SIZES[0] / 4, down=SIZES[0] / 4)
    choice.greet("slow", 1.0, up=SIZES[3] / 4, down=SIZES[1] / 4)
    assert (choice.up("fast"), choice.up("slow")) == (RUNGS[0], RUNGS[3])
    assert choice.why("fast") == "speeds given by hand"
    choice.settle(["fast", "slow"])
    assert choice.down == RUNGS[1]  # the slowest


def test_the_broadcast_waits_for_the_slowest_or_a_quantile() -> None:
    for quantile, expected in ((0.0, 3), (0.25, 0)):
        choice = chooser(quantile=quantile)
        for name in "abcd":
            choice.greet(name, 1.0, up=1e9, down=SIZES[3] / 4 if name == "c" else 1e9)
        choice.settle("abcd")
        assert RUNGS.index(choice.down) == expected
    choice.settle("abd")  # who is gone is not waited for
    assert choice.down == RUNGS[0]


def test_a_site_that_misses_its_round_steps_down() -> None:
    choice = chooser()
    play(choice, "a", up=SIZES[0], rounds=3)
    choice.missed("a")
    choice.settle()
    assert choice.up("a") == RUNGS[1] and "no reply" in choice.why("a")
    choice.settle()  # not asked: nothing is known, nothing moves
    assert choice.up("a") == RUNGS[1] and choice.why("a") == ""


def test_sites_do_not_touch_each_other() -> None:
    alone, both = chooser(), chooser()
    one = play(alone, "a", up=SIZES[1] / 3, rounds=8)
    other = []
    for _ in range(8):
        sent = SIZES[RUNGS.index(both.up("a"))]
        both.observe("a", sent, 0, sent / (SIZES[1] / 3), work=30.0)
        both.observe("b", SIZES[3], 0, 500.0, work=30.0)
        both.settle(["a"])
        other.append(RUNGS.index(both.up("a")))
    assert one == other and both.up("b") == RUNGS[3]


def test_the_state_is_json_and_goes_on_to_the_bit() -> None:
    choice, rng = chooser(), random.Random(7)
    choice.greet("b", 2.5, up=3e5)
    twin = chooser()
    for round_ in range(30):
        for name in "abc":
            sent = SIZES[RUNGS.index(choice.up(name))]
            seconds = sent / rng.uniform(1e5, 2e6) + rng.uniform(0, 3)
            for each in (choice, twin) if round_ else (choice,):
                each.observe(name, sent, SIZES[2], seconds, work=20.0)
        if round_ % 5 == 2:
            for each in (choice, twin):
                each.missed("c")
        choice.settle()
        if round_:
            twin.settle()
            assert twin.state() == choice.state()
        state = json.loads(json.dumps(choice.state()))
        assert state == choice.state()
        twin = chooser()
        twin.restore(state)
        assert [twin.up(n) for n in "abc"] == [choice.up(n) for n in "abc"]


def test_a_ladder_changed_between_two_lives_keeps_what_is_measured() -> None:
    choice = chooser()
    play(choice, "a", up=SIZES[0], rounds=4)
    other = AdaptiveChoice(ladder("int8 > int2(block=64)"), Budget(10.0), SHAPES)
    other.restore(choice.state())
    assert other.up("a") == "int2(block=64)" and other.speeds("a") == choice.speeds("a")
    other.settle()
    play_on = AdaptiveChoice(RUNGS, Budget(10.0), SHAPES)
    play_on.restore(json.loads(json.dumps(choice.state())))
    assert play_on.up("a") == choice.up("a") == RUNGS[0]
