from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.errors import ConfigError
from flower_geo.training import InnerConfig, learning_rate


def rate(position: float, **values: Any) -> float:
    defaults = {"lr": 2.0, "warmup_steps": 4, "total_steps": 104, "min_lr_ratio": 0.1}
    return learning_rate(InnerConfig(**(defaults | values)), position)


def test_warmup_is_a_straight_line_that_ends_at_the_peak() -> None:
    assert [rate(k) for k in range(5)] == [0.5, 1.0, 1.5, 2.0, 2.0]
    assert rate(0, warmup_steps=0) == rate(0, warmup_steps=1) == 2.0


@pytest.mark.parametrize(
    ("schedule", "middle", "late"),
    [
        ("cosine", 0.2 + 1.8 * 0.5, 0.2 + 1.8 * 0.5 * (1 + math.cos(0.9 * math.pi))),
        ("linear", 0.2 + 1.8 * 0.5, 0.2 + 1.8 * 0.1),
        ("constant", 2.0, 2.0),
    ],
)
def test_courses(schedule: str, middle: float, late: float) -> None:
    assert rate(54, schedule=schedule) == pytest.approx(middle, rel=1e-12)
    assert rate(94, schedule=schedule) == pytest.approx(late, rel=1e-12)


def test_wsd_is_stable_and_then_falls() -> None:
    def wsd(position: float) -> float:
        return rate(position, schedule="wsd", total_steps=100, warmup_steps=4)

    assert wsd(4) == wsd(50) == wsd(80) == 2.0
    assert wsd(90) == pytest.approx(0.2 + 1.8 * 0.5)
    assert wsd(100) == pytest.approx(0.2)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_the_rate_stays_at_its_end(schedule: str) -> None:
    assert rate(104, schedule=schedule) == rate(1e6, schedule=schedule) == pytest.approx(0.2)
    assert rate(1e6, schedule=schedule, min_lr_ratio=0.0) == 0.0


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant", "wsd"]),
    warmup=st.integers(0, 50),
    total=st.integers(1, 200),
    ratio=st.floats(0, 1),
    positions=st.tuples(st.floats(0, 300), st.floats(0, 300)),
)
def test_rates_are_bounded_and_fall_after_the_warmup(
    schedule: Any, warmup: int, total: int, ratio: float, positions: tuple[float, float]
) -> None:
    values = {
        "schedule": schedule, "warmup_steps": warmup, "total_steps": total, "min_lr_ratio": ratio,
    }  # fmt: skip
    first, second = sorted(positions)
    early, late = rate(first, **values), rate(second, **values)
    assert 0 < early <= 2.0 or (early == 0 and ratio == 0)
    assert late <= 2.0
    if first >= warmup:
        assert 2.0 * ratio * (1 - 1e-12) <= late <= early * (1 + 1e-12)
    elif second < warmup:
        assert early <= late


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"lr": math.nan}, "lr=nan"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"weight_decay": -0.1}, "weight-decay"),
        ({"clip_norm": -1.0}, "clip-norm"),
        ({"warmup_steps": -1}, "warmup-steps"),
        ({"total_steps": 0}, "total-steps"),
        ({"min_lr_ratio": 1.5}, "min-lr-ratio"),
        ({"grad_accum": 0}, "grad-accum"),
        ({"schedule": "cosin"}, "cosine or linear or constant or wsd"),
        ({"precision": "fp16"}, "auto or fp32 or bf16"),
        ({"optimizer": "adam"}, "adamw or sgd"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        InnerConfig(**values)
    assert "\n" not in str(caught.value)


def test_defaults_are_valid() -> None:
    assert InnerConfig().betas == (0.9, 0.95)
