"""Reading a run's configuration: an app's defaults under ``--run-config``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from flower_geo.config.keys import CommonConfig, Scalar
from flower_geo.config.names import kebab, nearest
from flower_geo.config.strategies import config_for
from flower_geo.errors import ConfigError

__all__ = ["AppSettings", "load_app", "parse", "parse_overrides"]

_C = TypeVar("_C", bound=CommonConfig)


def parse(model: type[_C], values: Mapping[str, Any]) -> _C:
    """Check ``values`` (kebab-case keys) against ``model``.

    Raises:
        ConfigError: an unknown key (with the nearest known one) or a value of
            the wrong type or range, in one line.
    """
    known = {kebab(name) for name in model.model_fields}
    for key in values:
        if key not in known:
            raise ConfigError(
                f"run-config key '{key}' is not known{nearest(key, known)} "
                "('flower-geo config' lists the keys)"
            )
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        message = first["msg"].removeprefix("Value error, ")
        message = message[:1].lower() + message[1:]
        if not where:
            raise ConfigError(f"run-config: {message}") from None
        given = values.get(where, first.get("input"))
        raise ConfigError(f"run-config {where}={given!r}: {message}") from None


def parse_overrides(pieces: Iterable[str]) -> dict[str, Scalar]:
    """Read ``--run-config`` strings: ``key=value`` pairs, or one ``.toml`` file.

    Values are TOML (``"text"``, ``3``, ``0.5``, ``true``); a bare word such as
    ``fp32`` is taken as text, which Flower itself would refuse.

    Raises:
        ConfigError: a piece that is neither.
    """
    merged: dict[str, Scalar] = {}
    for piece in pieces:
        if piece.strip().endswith(".toml") and "=" not in piece:
            merged.update(_read_toml(Path(piece.strip()).expanduser()))
            continue
        for key, value in _pairs(piece).items():
            try:
                merged[key] = tomllib.loads(f"v = {value}")["v"]
            except tomllib.TOMLDecodeError:
                merged[key] = value
    return merged


def _pairs(piece: str) -> dict[str, str]:
    pattern = re.compile(r"""\s*([A-Za-z0-9_.-]+)=("[^"]*"|'[^']*'|\S+)""")
    pairs, at = dict[str, str](), 0
    while piece[at:].strip():
        match = pattern.match(piece, at)
        if not match:
            raise ConfigError(
                f"run-config {piece[at:].strip()!r} cannot be read: write key=value pairs "
                "divided by spaces, text with spaces in quotes"
            )
        if match[1] in pairs:
            raise ConfigError(f"'{match[1]}' is given twice in {piece.strip()!r}; leave one out")
        pairs[match[1]] = match[2]
        at = match.end()
    return pairs


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return dict(tomllib.loads(path.read_text()))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None


@dataclass(frozen=True)
class AppSettings:
    """A Flower app's folder with its run configuration, checked.

    Attributes:
        folder: absolute path of the app.
        config: defaults of the app's pyproject.toml under the overrides.
        overrides: the overrides alone, typed, as ``flwr run`` takes them.
    """

    folder: Path
    config: CommonConfig
    overrides: dict[str, Scalar]


def load_app(folder: str | Path, overrides: Iterable[str] = ()) -> AppSettings:
    """Read and check an app's configuration as the ServerApp will see it.

    Raises:
        ConfigError: no app there, an unknown key or an ill-typed value.
    """
    path = Path(folder).expanduser().resolve()
    pyproject = path / "pyproject.toml"
    if not pyproject.is_file():
        raise ConfigError(f"{path} is no Flower app: it has no pyproject.toml")
    tool: Any = _read_toml(pyproject).get("tool", {})
    table = tool.get("flwr", {}).get("app", {})
    defaults = table.get("config", {})
    given = parse_overrides(overrides)
    merged = {**defaults, **given}
    model = config_for(str(merged.get("strategy", "diloco")))
    return AppSettings(path, parse(model, merged), given)
