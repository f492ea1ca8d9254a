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
    config_for,
)
from flower_geo.config.names import check_name, kebab, nearest
from flower_geo.config.read import AppSettings, load_app, parse, parse_overrides

__all__ = [
    "FIXED_KEYS",
    "TRAINING_KEYS",
    "AppSettings",
    "CommonConfig",
    "DiLoCoConfig",
    "check_name",
    "config_for",
    "kebab",
    "load_app",
    "nearest",
    "parse",
    "parse_overrides",
]
