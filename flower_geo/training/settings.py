"""From a run's configuration to the settings of an inner loop."""

from __future__ import annotations

from flower_geo.config import CommonConfig
from flower_geo.training.schedule import InnerConfig

__all__ = ["inner_config"]


def inner_config(config: CommonConfig, total_steps: int) -> InnerConfig:
    """Settings of the inner loop."""
    return InnerConfig(
        lr=config.inner_lr, weight_decay=config.weight_decay, clip_norm=config.clip_norm,
        warmup_steps=config.warmup_steps, total_steps=total_steps, schedule=config.schedule,
        min_lr_ratio=config.min_lr_ratio, grad_accum=config.grad_accum,
        precision=config.precision, optimizer=config.inner_optimizer,
    )  # fmt: skip
