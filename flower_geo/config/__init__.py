"""Run configuration: typed, kebab-case, checked before anything starts.

Users write the keys in an app's ``[tool.flwr.app.config]`` table or in
``--run-config``.
"""

from __future__ import annotations

from flower_geo.config.keys import (
    FIXED_KEYS,
    TRAINING_KEYS,
    CommonConfig,
    DiLoCoConfig,
)
from flower_geo.config.lora import FedAvgLoRAConfig, names_of, numbers_of
from flower_geo.config.names import check_name, kebab, nearest
from flower_geo.config.read import AppSettings, load_app, parse, parse_overrides
from flower_geo.config.split import SplitConfig
from flower_geo.config.strategies import STRATEGIES, config_for

__all__ = [
    "FIXED_KEYS",
    "STRATEGIES",
    "TRAINING_KEYS",
    "AppSettings",
    "CommonConfig",
    "DiLoCoConfig",
    "FedAvgLoRAConfig",
    "SplitConfig",
    "check_name",
    "config_for",
    "kebab",
    "load_app",
    "names_of",
    "nearest",
    "numbers_of",
    "parse",
    "parse_overrides",
]
