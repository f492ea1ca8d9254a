"""The figures' section on split learning, from figures made up."""

from __future__ import annotations

from benchmarks.bench_split import NAMES, RUNS, page


def test_every_run_has_a_row_against_the_unsplit_one() -> None:
    rates = {name: 1000.0 * (index + 1) for index, name in enumerate(RUNS)}
    text = page({"rates": rates, "load": 0.3})
    assert all(f"| {NAMES[name]} |" in text for name in RUNS)
    assert f"| {NAMES['vanilla']} | 2000 | 2 | 0.85 |" in text and "not quiet" not in text


def test_a_busy_machine_is_told() -> None:
    assert "load 4.0" in page({"rates": dict.fromkeys(RUNS, 1.0), "load": 4.0})
