"""The ways of training as a site does them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flower_geo.config import CommonConfig, FedAvgLoRAConfig, SplitConfig
from flower_geo.site.tasks.base import Task
from flower_geo.site.tasks.pretrain import Pretraining

__all__ = ["Task", "task_for"]


def task_for(
    config: CommonConfig,
    node_config: Mapping[str, Any],
    device: str,
    total_steps: int,
    phase: Callable[[str], None],
) -> Task:
    """The task of the configuration's strategy."""
    if isinstance(config, SplitConfig):
        from flower_geo.site.tasks.split import Split

        return Split(config, node_config, device, total_steps, phase)
    if isinstance(config, FedAvgLoRAConfig):
        # Imported here: plain pretraining needs no PEFT.
        from flower_geo.site.tasks.adapters import Adapters

        return Adapters(config, node_config, device, total_steps, phase)
    return Pretraining(config, node_config, device, total_steps, phase)
