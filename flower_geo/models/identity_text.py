"""A base model's identity as one short text, for a message."""

from __future__ import annotations

from collections.abc import Mapping

from flower_geo.models.identity import IDENTITY, differing

__all__ = ["differing_in", "identity_text"]

#: Hex letters kept of each hash.
_KEPT = 12


def identity_text(parts: Mapping[str, str]) -> str:
    """``weights=0123456789ab,config=...``: at most 128 letters."""
    return ",".join(f"{name}={parts[name][:_KEPT]}" for name in IDENTITY)


def differing_in(ours: str, theirs: str) -> list[str]:
    """Names of the parts in which two texts differ; nothing of ``theirs`` is in it."""
    return differing(_parts(ours), _parts(theirs))


def _parts(text: str) -> dict[str, str]:
    return {name: value for name, _, value in (part.partition("=") for part in text.split(","))}
