"""Settings of the inner loop and the learning rate as a function of position."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from flower_geo.errors import ConfigError
from flower_geo.evaluation.precision import Precision

__all__ = ["InnerConfig", "Optimizer", "Precision", "Schedule", "learning_rate"]

Schedule = Literal["cosine", "linear", "constant", "wsd"]
Optimizer = Literal["adamw", "sgd"]

#: Share of the run, at its end, in which a warmup-stable-decay schedule falls.
WSD_DECAY = 0.2


@dataclass(frozen=True, kw_only=True)
class InnerConfig:
    """Settings of one site's local training.

    Attributes:
        lr: peak learning rate.
        betas: AdamW's decay rates.
        eps: AdamW's denominator offset.
        weight_decay: decoupled decay of matrices; biases, norms and other
            vectors are not decayed.  For SGD, an L2 term on the same tensors.
        clip_norm: largest global gradient norm; 0 = no clipping.
        warmup_steps: steps of linear warmup.
        total_steps: steps of the whole run, over all rounds.
        schedule: course after the warmup.
        min_lr_ratio: where it ends, as a share of ``lr``.
        grad_accum: batches in one optimizer step, weighted by their tokens.
        precision: ``auto`` is bf16 autocast on CUDA devices with native bf16
            and fp32 elsewhere.  Weights and optimizer state are fp32 always.
        optimizer: ``adamw``, or ``sgd`` without momentum.
        prox_mu: strength of FedProx's pull back to the weights the round began
            with, mu/2 · |x − x₀|² over the trained parameters; 0 = off.

    Raises:
        ConfigError: a value is out of its range.
    """

    lr: float = 4e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup_steps: int = 0
    total_steps: int = 1
    schedule: Schedule = "cosine"
    min_lr_ratio: float = 0.1
    grad_accum: int = 1
    precision: Precision = "auto"
    optimizer: Optimizer = "adamw"
    prox_mu: float = 0.0

    def __post_init__(self) -> None:
        checks: tuple[tuple[str, bool, str], ...] = (
            ("lr", _finite(self.lr) and self.lr >= 0, "0 or more"),
            ("betas", all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"),
            ("eps", _finite(self.eps) and self.eps > 0, "more than 0"),
            ("weight_decay", _finite(self.weight_decay) and self.weight_decay >= 0, "0 or more"),
            ("clip_norm", _finite(self.clip_norm) and self.clip_norm >= 0, "0 or more"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("total_steps", self.total_steps >= 1, "1 or more"),
            ("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "0 to 1"),
            ("grad_accum", self.grad_accum >= 1, "1 or more"),
            ("prox_mu", _finite(self.prox_mu) and self.prox_mu >= 0, "0 or more"),
            *(
                (name, getattr(self, name) in get_args(kind), " or ".join(get_args(kind)))
                for name, kind in _CHOICES
            ),
        )
        for name, good, wanted in checks:
            if not good:
                raise ConfigError(
                    f"{name.replace('_', '-')}={getattr(self, name)} is out of range; use {wanted}"
                )


_CHOICES: tuple[tuple[str, Any], ...] = (
    ("schedule", Schedule),
    ("precision", Precision),
    ("optimizer", Optimizer),
)


def _finite(value: float) -> bool:
    return math.isfinite(value)


def learning_rate(config: InnerConfig, position: float) -> float:
    """Learning rate at a position of the run's schedule.

    The position counts the steps of the whole run from 0 and need not be whole:
    a site that takes n steps where others take m walks the same course in other
    strides.  A site that was away comes back at the position the run has
    reached.  Beyond ``total_steps`` the rate stays at its end.

    The first step has ``lr / warmup_steps``, the step at ``warmup_steps`` - 1
    has ``lr``.  ``wsd`` is constant until 80 % of the run and then falls linearly.
    """
    if position + 1 < config.warmup_steps:
        return config.lr * (position + 1) / config.warmup_steps
    return config.lr * _course(config, position)


def _course(config: InnerConfig, position: float) -> float:
    if config.schedule == "constant":
        return 1.0
    begin: float = config.warmup_steps
    if config.schedule == "wsd":
        begin = max(begin, config.total_steps * (1 - WSD_DECAY))
    length = config.total_steps - begin
    done = min(max((position - begin) / length, 0.0), 1.0) if length > 0 else 1.0
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if config.schedule == "cosine" else 1.0 - done
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left
