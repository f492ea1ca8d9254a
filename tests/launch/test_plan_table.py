from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from flower_geo.errors import CodecSpecError, ConfigError, ModelError
from flower_geo.launch.plan_table import (
    HEADS,
    LINES,
    PlanOptions,
    encoded_size,
    facts,
    line_rows,
    plan,
    readme_table,
    verdict,
)

SMALL = PlanOptions(
    "llama-nano", bottom=1, length=32, batch=2, micro_batches=4, site_gflops=1, cloud_gflops=100
)


def test_bytes_are_those_of_the_codec() -> None:
    planned = plan(replace(SMALL, activations="int4(block=64)", gradients="fp32"))
    values = 2 * 32 * 128
    assert values / 2 < planned.plan.work.up - 4 * 64 < 0.6 * values
    assert 4 * values < planned.plan.work.down < 4 * values + 200


def test_a_large_tensor_is_measured_by_a_part() -> None:
    exact, many = encoded_size("int8(block=64)", (1, 64, 64)), (64, 512, 1024)
    assert 64 * 64 < exact < 1.2 * 64 * 64
    per_value = encoded_size("int8(block=64)", many) / (64 * 512 * 1024)
    assert per_value == pytest.approx(1 + 4 / 64, rel=0.05)


def test_a_fast_cloud_behind_a_fast_line_pays() -> None:
    planned = plan(SMALL)
    assert planned.over(1, 10_000).total < planned.whole
    said = verdict(planned, 1, 10_000)
    assert said.startswith("It pays: a split step is ") and "times as fast" in said
    assert "\n" not in said


def test_a_slow_line_does_not_pay_and_says_what_does() -> None:
    planned = plan(SMALL)
    said = verdict(planned, 50, 0.1)
    assert said.startswith("It does not pay in time") and "the line up" in said
    assert "(faster at 50 ms from " in said and "memory" in said
    assert "(faster at 60000 ms over no line)" in verdict(planned, 60_000, 100)


def test_where_the_whole_model_does_not_fit_time_is_no_matter() -> None:
    planned = plan(replace(SMALL, bottom=0))
    made = planned.plan
    between = (made.split_memory + made.whole_memory) // 2
    options = replace(planned.options, site_memory=between)
    said = verdict(replace(planned, options=options), 60_000, 1)
    assert said.startswith("It pays: the whole model does not fit")
    options = replace(options, site_memory=made.split_memory - 1)
    assert verdict(replace(planned, options=options), 1, 1000).startswith("It does not fit")


def test_a_row_a_line_and_one_for_the_whole_model() -> None:
    planned = plan(SMALL)
    rows = line_rows(planned, LINES)
    assert len(rows) == len(LINES) + 1 and {len(row) for row in rows} == {len(HEADS)}
    assert rows[0][0] == "10 ms, 1000" and rows[-1][0] == "whole model at the site"
    table = readme_table(planned)
    assert table.count("\n") == len(rows) + 2 and table.startswith("| round trip, Mbit/s |")
    assert all(f"| {row[0]} | {row[1]} |" in table for row in rows)


def test_a_speed_that_is_not_given_is_measured_and_said_to_be() -> None:
    planned = plan(replace(SMALL, site_gflops=0, cloud_gflops=0))
    assert planned.measured and planned.speeds.site == planned.speeds.cloud > 1e6
    names = [name for name, *_ in facts(planned)]
    assert "speed of the site (measured here)" in names
    assert "speed of the cloud (taken as the site's)" in names
    assert "speed of the site (given)" in [name for name, *_ in facts(plan(SMALL))]


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"site_gflops": -1.0}, ConfigError, "site-gflops -1"),
        ({"cloud_gflops": float("nan")}, ConfigError, "cloud-gflops nan"),
        ({"activations": "int9"}, CodecSpecError, "int9"),
        ({"bottom": 4}, ModelError, "leave none"),
        ({"rank": 0}, ModelError, "rank"),
        ({"batch": 0}, ConfigError, "batch-size 0"),
    ],
    ids=["site", "cloud", "codec", "cut", "rank", "batch"],
)
def test_wrong_options_are_refused(
    changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        plan(replace(SMALL, **changes))


@pytest.mark.parametrize(("rtt", "mbit"), [(-1, 1), (1, 0), (float("inf"), 1)])
def test_no_such_line(rtt: float, mbit: float) -> None:
    with pytest.raises(ConfigError, match="carries nothing"):
        plan(SMALL).over(rtt, mbit)
