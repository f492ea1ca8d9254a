"""A base model's identity as a short text."""

from __future__ import annotations

import hashlib

from flower_geo.messages import MAX_HASH
from flower_geo.models.identity import IDENTITY
from flower_geo.models.identity_text import differing_in, identity_text


def parts(**other: str) -> dict[str, str]:
    found = {name: hashlib.sha256(name.encode()).hexdigest() for name in IDENTITY}
    return found | {name.replace("_", "-"): value for name, value in other.items()}


def test_it_fits_a_message() -> None:
    assert len(identity_text(parts())) <= MAX_HASH


def test_what_differs_is_named() -> None:
    ours = identity_text(parts())
    assert differing_in(ours, ours) == []
    assert differing_in(ours, identity_text(parts(tokenizer="0" * 64))) == ["tokenizer"]
    other = parts(weights="1" * 64, chat_template="2" * 64)
    assert differing_in(ours, identity_text(other)) == ["weights", "chat-template"]


def test_a_text_of_another_kind_differs_in_everything() -> None:
    for text in ("", "weights", "=,=,=", "weights=<b>x</b>", "x" * 128):
        assert differing_in(identity_text(parts()), text) == list(IDENTITY)
