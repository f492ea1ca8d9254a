"""Pieces of the report's HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["table_of"]


def table_of(
    caption: str, heads: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]], css: str = ""
) -> str:
    """Build a table of escaped cells; the first cell of a row is its heading."""
    head = "".join(f'<th scope="col" class="{c}">{escape(text)}</th>' for text, c in heads)
    body = []
    for first, *rest in rows:
        cells = "".join(
            f'<td class="{c}">{cell}</td>' for cell, (_, c) in zip(rest, heads[1:], strict=True)
        )
        body.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{css}"><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
