"""The ways of training: what is sent, and how replies become the next model."""

from __future__ import annotations

from flower_geo.strategies.base import GeoStrategy
from flower_geo.strategies.diloco import DiLoCo
from flower_geo.strategies.fedavg_lora import FedAvgLoRA
from flower_geo.strategies.split import SplitFineTune
from flower_geo.strategies.start import initial_arrays

__all__ = ["DiLoCo", "FedAvgLoRA", "GeoStrategy", "SplitFineTune", "initial_arrays"]
