"""Who a site is and where it keeps its state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_geo.config import check_name
from flower_geo.errors import ConfigError

__all__ = ["cache_folder", "link_speeds", "node_number", "node_value", "site_name", "state_folder"]

#: Set where simulated sites run; a real site names its folder in node-config.
STATE_DIR_VARIABLE = "FLOWER_GEO_STATE_DIR"


def node_value(node_config: Mapping[str, Any], key: str, default: str = "") -> str:
    """A node-config value as text."""
    value = node_config.get(key, default)
    return str(value)


def node_number(node_config: Mapping[str, Any], key: str, default: int) -> int:
    """A node-config value that counts something.

    Raises:
        ConfigError: it is no whole number, or negative.
    """
    value = node_config.get(key, default)
    try:
        number = int(value)
        whole = number == float(value) and number >= 0 and not isinstance(value, bool)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise ConfigError(f"node-config {key}={value!r} is no whole number of 0 or more")
    return number


def link_speeds(node_config: Mapping[str, Any]) -> dict[str, float]:
    """Speeds of the line given by hand: node-config ``uplink-mbps``, ``downlink-mbps``.

    Returns:
        Megabits a second under those names; a speed that is not given is left out.

    Raises:
        ConfigError: one is no number above 0.
    """
    speeds = {}
    for key in ("uplink-mbps", "downlink-mbps"):
        if key not in node_config:
            continue
        try:
            speed = float(node_config[key])
        except (TypeError, ValueError):
            speed = 0.0
        if not 0 < speed < 1e9 or isinstance(node_config[key], bool):
            raise ConfigError(
                f"node-config {key}={node_config[key]!r} is no speed; give megabits a second, "
                "such as 20 or 0.5"
            )
        speeds[key] = speed
    return speeds


def site_name(node_config: Mapping[str, Any]) -> str:
    """Name of the site: node-config ``site``, else ``site-<partition-id>``.

    Raises:
        ConfigError: neither is given, or the name cannot name a folder.
    """
    if "site" in node_config:
        return check_name(str(node_config["site"]), "node-config site")
    if "partition-id" in node_config:
        number = node_number(node_config, "partition-id", 0)
        return check_name(f"site-{number}", "site name")
    raise ConfigError(
        "this site has no name: start flower-supernode with --node-config 'site=\"my-name\"'"
    )


def state_folder(node_config: Mapping[str, Any]) -> Path:
    """Folder for the state of all runs at this site.

    Node-config ``state-dir``, else the environment's, else the user's state
    directory.
    """
    chosen = node_value(node_config, "state-dir") or os.environ.get(STATE_DIR_VARIABLE, "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "flower-geo" / "sites"


def cache_folder(node_config: Mapping[str, Any]) -> Path:
    """Folder for tokenised data, shared by all runs at this site.

    Node-config ``cache-dir``, else ``$FLOWER_GEO_CACHE_DIR``, else the user's
    cache directory.
    """
    chosen = node_value(node_config, "cache-dir") or os.environ.get("FLOWER_GEO_CACHE_DIR", "")
    if chosen:
        return Path(chosen).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "flower-geo"
