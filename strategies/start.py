"""Initial weights for a strategy's ``start``."""

from __future__ import annotations

from flwr.app import ArrayRecord

from flower_geo.compression import codec, pack
from flower_geo.config import CommonConfig, FedAvgLoRAConfig
from flower_geo.strategies.adapter import AdapterModel
from flower_geo.strategies.model import RunModel

__all__ = ["initial_arrays"]


def initial_arrays(config: CommonConfig) -> ArrayRecord:
    """Initial weights of the configured model or adapter, losslessly packed.

    Raises:
        ModelError: the model cannot be built or does not fit its tokenizer.
    """
    model = AdapterModel(config) if isinstance(config, FedAvgLoRAConfig) else RunModel(config)
    return pack(model.weights(), codec("fp32"))
