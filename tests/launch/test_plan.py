from __future__ import annotations

from dataclasses import replace

import pytest

from flower_geo.errors import ConfigError
from flower_geo.launch.plan import (
    Line,
    Speeds,
    Work,
    make_plan,
    pays_from,
    step_time,
    whole_time,
)
from flower_geo.models.split import Cut, part_sizes

WORK = Work(site=4.0, cloud=20.0, whole=24.0, up=100, down=50, trips=1)
#: Seconds of a micro-batch: site 2, line up 1, cloud 1, line down 0.5.
SPEEDS, LINE = Speeds(site=2.0, cloud=20.0), Line(rtt=0.25, up=100.0, down=100.0)


def simulated(stages: list[float], delay: float, jobs: int, window: int) -> float:
    """Time until ``jobs`` passed all stages in order, at most ``window`` of them at once."""
    free = [0.0] * len(stages)
    ended: list[float] = []
    for job in range(jobs):
        now = ended[job - window] if job >= window else 0.0
        for stage, seconds in enumerate(stages):
            now = free[stage] = max(now, free[stage]) + seconds
        ended.append(now + delay)
    return ended[-1]


def test_one_micro_batch_takes_all_stages_and_its_round_trip() -> None:
    step = step_time(WORK, SPEEDS, LINE, 1)
    assert step.fill == 2 + 1 + 1 + 0.5 + 0.25
    assert step.total == step.fill + LINE.rtt
    assert step.stages == {"site": 2, "line up": 1, "cloud": 1, "line down": 0.5}


def test_in_a_full_pipeline_the_slowest_stage_sets_the_pace() -> None:
    step = step_time(WORK, SPEEDS, LINE, 5)
    assert (step.period, step.slowest) == (2, "site")
    assert step.total == step_time(WORK, SPEEDS, LINE, 1).total + 4 * 2
    slow = step_time(WORK, SPEEDS, replace(LINE, up=10.0), 5)
    assert (slow.period, slow.slowest) == (10, "line up")
    assert step_time(WORK, Speeds(2.0, 1.0), LINE, 5).slowest == "cloud"


@pytest.mark.parametrize("jobs", [1, 3, 8])
@pytest.mark.parametrize("line", [LINE, Line(0, 10, 1000), Line(3, 1000, 20)], ids="abc")
def test_it_is_what_a_simulated_pipeline_takes(jobs: int, line: Line) -> None:
    step = step_time(WORK, SPEEDS, line, jobs)
    took = simulated(list(step.stages.values()), line.rtt, jobs, jobs)
    assert step.total == pytest.approx(took + line.rtt)


def test_too_few_on_the_way_wait_for_the_round_trip() -> None:
    far = replace(LINE, rtt=10.0)
    one, two, all_ = (step_time(WORK, SPEEDS, far, 6, flying) for flying in (1, 2, 0))
    assert one.period == one.fill and one.total == pytest.approx(6 * one.fill + 10)
    assert one.slowest == two.slowest == "waiting" and all_.slowest == "site"
    assert one.total > two.total > all_.total
    assert step_time(WORK, SPEEDS, far, 6, 99) == all_
    for flying, step in ((1, one), (2, two)):
        took = simulated(list(step.stages.values()), 10.0, 6, flying)
        assert took <= step.total - 10.0 + 1e-9 < 1.35 * took


def test_the_line_from_which_it_pays() -> None:
    work = replace(WORK, up=10**6, down=10**5)
    assert whole_time(work, SPEEDS, 5) == 60
    mbit = pays_from(work, SPEEDS, 0.25, 5)
    assert mbit is not None
    for share, pays in ((0.98, False), (1.02, True)):
        rate = share * mbit * 125_000
        assert (step_time(work, SPEEDS, Line(0.25, rate, rate), 5).total < 60) is pays
    assert pays_from(work, SPEEDS, 60.0, 5) is None
    assert pays_from(replace(work, site=24.0), SPEEDS, 0.0, 5) is None


def test_a_plan_adds_up() -> None:
    sizes = part_sizes("gpt2-nano", Cut(1))
    made = make_plan(sizes, 16, 2, 3, activations=1000, gradients=700)
    assert (made.up, made.down) == (3 * (1000 + 4 * 32), 3 * 700)
    assert made.tokens == 96 and made.work.trips == 1
    assert made.work.site + made.work.cloud == pytest.approx(made.work.whole)
    assert made.whole_memory == sizes["whole"].memory(32)
    assert made.split_memory == sizes["bottom"].memory(96)
    assert make_plan(sizes, 16, 2, 3, 1000, 700, 1).split_memory == sizes["bottom"].memory(32)


def test_a_u_shape_sends_no_label_and_crosses_twice() -> None:
    sizes = part_sizes("gpt2-nano", Cut(1, 1))
    made = make_plan(sizes, 16, 2, 3, activations=1000, gradients=700)
    assert made.up == made.down == 3 * 1700 and made.work.trips == 2
    assert made.work.site + made.work.cloud == pytest.approx(made.work.whole)
    # the site holds its tied embedding once
    table = 4 * 4096 * 128
    both = sizes["bottom"].memory(96) + sizes["top"].memory(32)
    assert made.split_memory == both - table


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ((1, 1, 1, 1, 1), "seq-len 1"),
        ((8, 0, 1, 1, 1), "batch-size 0"),
        ((8, 1, 0, 1, 1), "micro-batches 0"),
        ((8, 1, 1, 1, 1, -1), "in-flight -1"),
    ],
    ids=["length", "batch", "micro", "flight"],
)
def test_numbers_that_make_no_step_are_refused(numbers: tuple[int, ...], said: str) -> None:
    sizes = part_sizes("gpt2-pico", Cut(1))
    with pytest.raises(ConfigError, match=said):
        make_plan(sizes, *numbers)
