"""Readers and tables for the command line."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

from flower_geo.config import CommonConfig, kebab, nearest, parse_overrides
from flower_geo.errors import ConfigError

__all__ = ["NODE_KEYS", "by_site", "check_node_keys", "key_table", "variables"]

#: Keys of a node-config that flower_geo reads, for other apps there may be more.
NODE_KEYS = (
    "site", "data", "state-dir", "cache-dir", "device", "uplink-mbps", "downlink-mbps",
    "inner-steps", "inner-seconds", "batch-size", "grad-accum", "threads", "tokenizer",
    "partition-id", "num-partitions", "snapshot-steps", "worker", "worker-idle", "worker-stall",
    "rank", "alpha",
)  # fmt: skip


def check_node_keys(keys: Iterable[str]) -> None:
    """Refuse what looks like a slip of one of our keys; other apps' keys pass.

    Raises:
        ConfigError: an unknown key that is close to one of :data:`NODE_KEYS`.
    """
    for key in keys:
        if key not in NODE_KEYS and (meant := nearest(key, NODE_KEYS)):
            raise ConfigError(f"node-config key '{key}' is not known{meant}")


def by_site(texts: Iterable[str]) -> dict[int, dict[str, Any]]:
    """Read ``NUMBER:key=value ...`` texts.

    Raises:
        ConfigError: a text without a site's number, or one that cannot be read.
    """
    sites: dict[int, dict[str, Any]] = {}
    for text in texts:
        number, colon, pairs = text.partition(":")
        if not colon or not number.strip().isdecimal():
            raise ConfigError(
                f"--site-config {text!r} names no site; write NUMBER:key=value, as in 0:data=a.txt"
            )
        sites.setdefault(int(number), {}).update(parse_overrides([pairs]))
    return sites


def variables(texts: Iterable[str]) -> dict[str, str]:
    """Read ``NAME=VALUE`` texts.

    Raises:
        ConfigError: a text without ``=``.
    """
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigError(f"--env {text!r} is no variable; write NAME=VALUE")
        found[name] = value
    return found


def key_table(model: type[CommonConfig]) -> Table:
    """Keys, types, defaults and meanings of a configuration."""
    table = Table("key", "default", "type", "meaning")
    properties = model.model_json_schema(by_alias=True)["properties"]
    for name, field in model.model_fields.items():
        schema = properties[kebab(name)]
        table.add_row(kebab(name), repr(field.default), _kind(schema), field.description or "")
    return table


def _kind(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(str(one) for one in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    bounds = {
        "minimum": "≥ {}", "exclusiveMinimum": "> {}", "maximum": "≤ {}",
        "exclusiveMaximum": "< {}",
    }  # fmt: skip
    parts = [text.format(schema[key]) for key, text in bounds.items() if key in schema]
    return " ".join([str(schema.get("type", "")), ", ".join(parts)]).strip()
