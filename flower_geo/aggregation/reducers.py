"""Streaming reductions: tensor by tensor, contributions read from where they lie.

Memory is a few tensors a thread whatever the number of contributions: each blob
is decoded straight into one fp64 accumulator and forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from flower_geo.compression import Codec
from flower_geo.compression.parallel import in_order, thread_count
from flower_geo.errors import RoundError

__all__ = [
    "Contribution",
    "shares",
    "weighted_mean",
]


class Contribution(Protocol):
    """One site's update: encoded tensors with a weight."""

    @property
    def weight(self) -> float:
        """Non-negative weight in the mean, in tokens, examples or sites."""

    @property
    def kind(self) -> str:
        """``"weights"`` (blobs hold local weights) or ``"delta"`` (base minus local)."""

    def names(self) -> Collection[str]:
        """Names of the tensors it holds."""

    def blob(self, name: str) -> bytes:
        """Encoded tensor ``name``."""


def shares(contributions: Sequence[Contribution]) -> list[float]:
    """Weights divided by their sum.

    Raises:
        RoundError: a weight is negative or not finite, or all are zero.
    """
    weights = [contribution.weight for contribution in contributions]
    if any(not math.isfinite(weight) or weight < 0 for weight in weights):
        raise RoundError("a contribution has a negative or infinite weight")
    total = math.fsum(weights)
    if total <= 0:
        raise RoundError("no contribution has any weight, so there is no mean")
    return [weight / total for weight in weights]


def weighted_mean(
    base: Mapping[str, Tensor],
    contributions: Sequence[Contribution],
    names: Iterable[str] | None = None,
    threads: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield ``(name, mean of the local weights)``, one tensor at a time.

    A contribution of kind ``weights`` adds ``p * local``; one of kind ``delta``
    adds ``p * (base - delta)``, so that both kinds fold into one mean.  The sum
    runs in fp64 in the order given: callers pass contributions in site order,
    which makes the result independent of arrival.  With a single contribution
    of weights the mean is that tensor to the bit.

    Args:
        base: fp32 tensors the contributions were trained from.
        contributions: at least one.
        names: tensors to reduce; all of ``base`` by default.
        threads: tensors reduced at a time (see ``parallel.thread_count``); the
            sums are the same for any number.

    Returns:
        fp64 tensors of the base's shapes.

    Raises:
        RoundError: the weights allow no mean.
        CorruptPayload: a blob does not decode to the base's shape.
    """
    parts = shares(contributions)
    deltas = math.fsum(
        part
        for part, contribution in zip(parts, contributions, strict=True)
        if contribution.kind == "delta"
    )

    def mean(name: str) -> tuple[str, Tensor]:
        start = base[name]
        total = torch.zeros(start.shape, dtype=torch.float64)
        if deltas:
            total.add_(start.double(), alpha=deltas)
        for part, contribution in zip(parts, contributions, strict=True):
            sign = -1.0 if contribution.kind == "delta" else 1.0
            Codec.add_into(contribution.blob(name), total, sign * part)
        return name, total

    wanted = list(base if names is None else names)
    values = len(parts) * sum(base[name].numel() for name in wanted)
    count = thread_count(threads, values)
    yield from in_order(mean, wanted, count, ahead=count)
