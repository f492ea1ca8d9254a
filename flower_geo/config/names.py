"""Names: kebab case, the nearest known one, and what may name a folder."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from flower_geo.errors import ConfigError

__all__ = ["check_name", "kebab", "nearest"]

#: Names that become folder names on the coordinator and at the sites.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def kebab(name: str) -> str:
    """``inner_steps`` -> ``inner-steps``."""
    return name.replace("_", "-")


def nearest(name: str, choices: Iterable[str]) -> str:
    """Return ``", did you mean 'x'?"`` for the closest choice, or an empty string."""
    close = difflib.get_close_matches(name, list(choices), n=1, cutoff=0.6)
    return f", did you mean '{close[0]}'?" if close else ""


def check_name(value: str, what: str) -> str:
    """Return ``value`` when it may name a folder, else raise ``ConfigError``.

    A run or site name reaches the file system of machines that did not choose
    it, so it can hold no separator and no leading dot.
    """
    if not _NAME.fullmatch(value):
        raise ConfigError(
            f"{what} {value[:80]!r} cannot name a folder: use 1 to 64 letters, digits, "
            "'.', '_' or '-', beginning with a letter or digit"
        )
    return value
