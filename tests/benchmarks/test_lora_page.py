"""The figures' section on federated LoRA, from figures made up."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.bench_lora import RULES, all_runs
from benchmarks.lora_deployed import outside
from benchmarks.lora_page import page
from benchmarks.lora_runs import QUICK, Sizes, rounds_for


def run(rule: str, mixed: bool, wire: str, rounds: int, seed: int, loss: float) -> dict[str, Any]:
    sent = 80_000_000 if wire == "fp32" else 5_000_000
    course = [[0, 0, 0, 7.0], [rounds, sent, sent, loss]]
    return {
        "rule": rule, "mixed": mixed, "wire": wire, "rounds": rounds, "seed": seed,
        "course": course[1:] if rule == "flower" else course, "error": 0.01,
    }  # fmt: skip


def side(loss: float, sent: int) -> dict[str, Any]:
    return {
        "up": sent, "down": sent, "socket_up": sent, "socket_down": 2 * sent, "outside": 5.0,
        "seconds": 60.0, "loss": loss, "mib": {"ServerApp": 400.0, "ClientApp": 300.0},
    }  # fmt: skip


@pytest.fixture
def figures() -> dict[str, Any]:
    sizes = Sizes(seeds=2)
    runs = [
        run(each.rule, each.mixed, each.wire, each.rounds, each.seed,
            6.0 if each.rule == "flower" else 6.03)
        for each in all_runs(sizes)
    ]  # fmt: skip
    return {
        "base": "A base.", "runs": runs, "steps": sizes.steps,
        "rounds": {rule: rounds_for(rule, sizes) for rule in RULES},
        "deployed": None, "real": None,
    }  # fmt: skip


def test_every_rule_has_a_row_and_gaps_are_to_the_same_seed(figures: dict[str, Any]) -> None:
    text = page(figures)
    for rule in RULES:
        assert f"| `{rule}`" in text
    lean = next(line for line in text.splitlines() if "| `lean` |" in line)
    assert "1/16.0" in lean and "0.50 (0.50 to 0.50)" in lean
    assert "from 7.000 before training" in text and "2 seeds" in text
    assert "real processes" not in text and "SmolLM2" not in text


def test_parts_that_ran_are_told(figures: dict[str, Any]) -> None:
    figures["deployed"] = {
        "rounds": 6, "steps": 96, "flower": side(6.0, 8_000_000), "lean": side(6.06, 1_000_000),
    }  # fmt: skip
    figures["deployed"]["lean"]["mib"]["worker"] = 350.0
    sites = {f"site-{i}": {"data": "ai", "labels": 10.0, "before": 4.0, "after": 3.0}
             for i in range(2)}  # fmt: skip
    alone = {name: site | {"after": 3.2} for name, site in sites.items()}
    figures["real"] = {
        "form": {"rank": 16, "rounds": 4, "inner-steps": 5, "batch-size": 4},
        "together": {"sites": sites, "up": 10, "down": 10, "parameters": 10},
        "alone": {"sites": alone},
    }  # fmt: skip
    text = page(figures)
    assert "Payload: 1/8.0 of Flower's" in text and "Loss: +1.00 %" in text
    assert "| peak memory of worker, MiB | - | 350 | - |" in text
    assert "| all |  | 20 | 4 | 3.2 | 3 | -6.25 |" in text


def test_a_rounds_time_outside_training_leaves_out_the_first_and_the_last() -> None:
    assert outside([100.0, 110.0, 121.0, 190.0], [9.0, 4.0, 5.0, 1.0]) == 6.0


@pytest.mark.parametrize("sizes", [Sizes(), QUICK])
def test_rounds_divide_the_steps_and_half_an_adapter_has_more(sizes: Sizes) -> None:
    rounds = {rule: rounds_for(rule, sizes) for rule in RULES}
    assert all(sizes.steps % count == 0 for count in rounds.values())
    assert rounds["ffa"] == 2 * rounds["avg"] and rounds["stack"] <= rounds["residual"]
