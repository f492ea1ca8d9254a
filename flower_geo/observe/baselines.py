"""Bytes sent, against what two plain ways of training the same run would have sent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, TypedDict

from flower_geo.observe.summary import RoundRow, Run, summarise

__all__ = ["BYTES_PER_VALUE", "BaselineBytes", "baseline_bytes", "compare", "round_baselines"]

BYTES_PER_VALUE: Final = 4
"""Both baselines send fp32: four bytes a parameter, each way."""


class BaselineBytes(TypedDict):
    """Totals in bytes over all sites, both ways; None where the log does not say enough.

    ``fp32_fedavg`` = answers x 2 x 4 x parameters: for every accepted answer the
    whole model once down and once up.  ``per_step_gradients`` = steps x 2 x 4 x
    parameters: for every inner step of every accepted answer a gradient up and
    the mean gradient down.  ``sent`` also holds what failed attempts cost.
    """

    sent: float
    sent_up: float
    sent_down: float
    fp32_fedavg: float | None
    per_step_gradients: float | None
    fp32_fedavg_ratio: float | None
    per_step_gradients_ratio: float | None
    parameters: float | None
    answers: float
    steps: float


def baseline_bytes(events: Iterable[Mapping[str, Any]]) -> BaselineBytes:
    """Compare the bytes of a run, given by its events, with both baselines."""
    return compare(summarise(events))


def round_baselines(row: RoundRow, parameters: float) -> tuple[float, float]:
    """Return the bytes (fp32 FedAvg, per-step fp32 gradients) of one round, both ways."""
    both_ways = 2 * BYTES_PER_VALUE * parameters
    return (row.accepted or 0) * both_ways, row.steps * both_ways


def compare(run: Run) -> BaselineBytes:
    """Compare the bytes of a run, already summed up, with both baselines."""
    up = sum(row.bytes_up for row in run.rounds)
    down = sum(row.bytes_down for row in run.rounds) + run.bytes_evaluation
    sent = up + down
    fedavg: float | None = None
    gradients: float | None = None
    if run.parameters is not None:
        pairs = [round_baselines(row, run.parameters) for row in run.rounds]
        fedavg = sum(pair[0] for pair in pairs)
        gradients = sum(pair[1] for pair in pairs)
    return {
        "sent": sent,
        "sent_up": up,
        "sent_down": down,
        "fp32_fedavg": fedavg or None,
        "per_step_gradients": gradients or None,
        "fp32_fedavg_ratio": fedavg / sent if fedavg and sent else None,
        "per_step_gradients_ratio": gradients / sent if gradients and sent else None,
        "parameters": run.parameters,
        "answers": sum(row.accepted or 0 for row in run.rounds),
        "steps": sum(row.steps for row in run.rounds),
    }
