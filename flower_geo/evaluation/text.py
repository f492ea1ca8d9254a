"""Held-out loss."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_geo.errors import DataError
from flower_geo.evaluation.precision import Precision, autocast, device_of

__all__ = ["EvalResult", "Sequences", "evaluate", "evaluating"]


class Sequences(Protocol):
    """Token sequences of one length: ``LongTensor[seq_len]`` by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Tensor: ...


@dataclass(frozen=True)
class EvalResult:
    """Sum of token losses in nats, and the number of tokens predicted."""

    loss_sum: float
    tokens: int

    @property
    def loss(self) -> float:
        """Mean loss per predicted token in nats; NaN when there was none."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    def __add__(self, other: EvalResult) -> EvalResult:
        return EvalResult(self.loss_sum + other.loss_sum, self.tokens + other.tokens)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    split: Sequences,
    batch_size: int,
    max_tokens: int | None = None,
    *,
    precision: Precision = "fp32",
) -> EvalResult:
    """Loss of next-token prediction over ``split``, summed in fp64.

    Neither the model nor its training mode nor any random state is changed.

    Args:
        model: a causal language model of transformers.
        split: the sequences; a sequence of n tokens has n - 1 predictions.
        batch_size: sequences a forward pass.
        max_tokens: look at about that many predictions (at least one sequence),
            in sequences spread evenly over the split; None = all.
        precision: as in ``InnerConfig``.

    Raises:
        DataError: the split is empty, or its sequences have fewer than two tokens.
    """
    if not len(split) or split[0].numel() < 2:
        raise DataError("no held-out text to evaluate on; give more text or a smaller seq-len")
    device = device_of(model)
    chosen = _spread(len(split), split[0].numel() - 1, max_tokens)
    total = torch.zeros((), dtype=torch.float64, device=device)
    tokens = 0
    with evaluating(model):
        for begin in range(0, len(chosen), batch_size):
            rows = [split[index] for index in chosen[begin : begin + batch_size]]
            batch = torch.stack(rows).to(device)
            with autocast(precision, device):
                logits = model(input_ids=batch, use_cache=False).logits
            losses = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none"
            )
            total += losses.sum(dtype=torch.float64)
            tokens += losses.numel()
    return EvalResult(float(total), tokens)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; the mode before is put back at the end."""
    training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(training)


def _spread(available: int, predictions: int, max_tokens: int | None) -> list[int]:
    """Indices of the sequences to look at, in order, without repetition."""
    wanted = available if max_tokens is None else max(1, max_tokens // predictions)
    count = min(available, wanted)
    return [index * available // count for index in range(count)]
