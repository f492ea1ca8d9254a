"""The configuration model of each way of training, by its name."""

from __future__ import annotations

from flower_geo.config.keys import CommonConfig, DiLoCoConfig
from flower_geo.config.lora import FedAvgLoRAConfig
from flower_geo.config.names import nearest
from flower_geo.config.split import SplitConfig
from flower_geo.errors import ConfigError

__all__ = ["STRATEGIES", "config_for"]

STRATEGIES: dict[str, type[CommonConfig]] = {
    "diloco": DiLoCoConfig,
    "fedavg-lora": FedAvgLoRAConfig,
    "split": SplitConfig,
}


def config_for(strategy: str) -> type[CommonConfig]:
    """Return the configuration model of a strategy by its name."""
    try:
        return STRATEGIES[strategy]
    except KeyError:
        raise ConfigError(
            f"strategy {strategy!r} is not known{nearest(strategy, STRATEGIES)} "
            f"(known: {', '.join(sorted(STRATEGIES))})"
        ) from None
