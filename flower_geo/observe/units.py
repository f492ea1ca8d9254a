"""Numbers and names from a metrics line, made fit for a person to read.

Everything here takes any value at all: a metrics line may come from an older
release, from a run that broke half-way, or carry a site name that somebody
chose in bad faith.
"""

from __future__ import annotations

import math
from typing import Final

__all__ = [
    "MISSING",
    "format_bytes",
    "format_count",
    "format_loss",
    "format_ratio",
    "format_seconds",
    "number",
    "plural",
    "printable",
]

MISSING: Final = "–"
"""Shown where a value is not known."""

_SI: Final = ("", "k", "M", "G", "T", "P", "E")
_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_JOINERS: Final = "\u200c\u200d"  # format characters that some scripts need to spell names


def number(value: object) -> float | None:
    """Return ``value`` as a finite float, or None where it is not one (bool counts as not one)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        result = float(value)
    except OverflowError:
        return None
    return result if math.isfinite(result) else None


def printable(value: object, limit: int = 80) -> str:
    """Return ``value`` as one line of at most ``limit`` characters without control characters.

    Terminal escapes, line breaks and direction overrides become U+FFFD, so that
    a name can neither move the cursor nor pass for another name.
    """
    if value is None:
        return MISSING
    raw = value if isinstance(value, str) else str(value)
    cut = raw[: limit - 1] + "…" if len(raw) > limit else raw
    return "".join(c if c.isprintable() or c in _JOINERS else "\ufffd" for c in cut)


def _three_digits(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _scaled(value: float, base: int, prefixes: tuple[str, ...]) -> tuple[str, str]:
    step = 0
    # 999.5 rounds to 1000, which belongs to the next prefix.
    while abs(value) >= base - 0.5 and step < len(prefixes) - 1:
        value /= base
        step += 1
    digits = f"{value:.0f}" if step == 0 else _three_digits(abs(value))
    sign = "-" if value < 0 and step else ""
    return sign + digits, prefixes[step]


def format_bytes(value: object, *, binary: bool = False) -> str:
    """Format a count of bytes, ``1.31 MB`` (powers of 1000) or ``1.25 MiB`` (powers of 2**10)."""
    amount = number(value)
    if amount is None:
        return MISSING
    digits, prefix = _scaled(amount, 1024 if binary else 1000, _BINARY if binary else _SI)
    return f"{digits} {prefix}B"


def format_count(value: object) -> str:
    """Format a plain count: ``812``, ``9,216``, ``1.31 M``, ``1.24 G``."""
    amount = number(value)
    if amount is None:
        return MISSING
    if abs(amount) < 100_000:
        return f"{amount:,.0f}"
    digits, prefix = _scaled(amount, 1000, _SI)
    return f"{digits} {prefix}".rstrip()


def format_loss(value: object) -> str:
    """Format a loss in nats per token with three decimals."""
    amount = number(value)
    return MISSING if amount is None else f"{amount:.3f}"


def format_ratio(value: object) -> str:
    """Format how many times larger one amount is than another: ``3.1×``, ``1,204×``."""
    amount = number(value)
    if amount is None:
        return MISSING
    if amount >= 100:
        return f"{amount:,.0f}×"
    return f"{amount:.1f}×" if amount >= 10 else f"{amount:.2f}×"


def format_seconds(value: object) -> str:
    """Format a duration given in seconds: ``0.8 s``, ``42 s``, ``3 min 05 s``, ``2 h 10 min``."""
    amount = number(value)
    if amount is None or amount < 0:
        return MISSING
    if amount < 9.95:
        return f"{amount:.1f} s"
    whole = round(amount)
    if whole < 60:
        return f"{whole} s"
    minutes, seconds = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours:02d} h"


def plural(count: float, one: str, many: str | None = None) -> str:
    """Return a count and its noun, in the plural where it must be."""
    return f"{count:,.0f} {one if count == 1 else many or one + 's'}"
