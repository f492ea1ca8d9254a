"""Base against local-only against federated: whether joining paid, as a table and as lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Final

from flower_geo.observe.html import table_of
from flower_geo.observe.units import MISSING, format_count, number, printable

__all__ = ["COLUMNS", "Compared", "compared_in", "comparison_card", "comparison_lines"]

#: Columns of a row, with their titles.
COLUMNS: Final = {"base": "base", "local": "local-only", "federated": "federated"}
_FIGURES: Final = ("loss", "accuracy", "exact_match")
_WHOLE: Final = "*"
_MAX_ROWS: Final = 500


@dataclass(frozen=True)
class Compared:
    """A row: figures by column, ``loss``, ``accuracy`` and ``exact_match`` where known."""

    name: str
    tokens: float | None = None
    figures: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def of(self, column: str, figure: str) -> float | None:
        """One figure, or None."""
        return self.figures.get(column, {}).get(figure)

    @property
    def gain(self) -> tuple[float, str] | None:
        """How much lower the federated loss is than local-only's, else than the base's."""
        mine = self.of("federated", "loss")
        for column in ("local", "base"):
            other = self.of(column, "loss")
            if mine is not None and other is not None:
                return other - mine, column
        return None


def compared_in(event: Mapping[str, Any]) -> list[Compared]:
    """Rows of a ``comparison`` event: sites, all of them, the coordinator's own set."""
    found = event.get("rows")
    rows = [row for row in found if isinstance(row, Mapping)] if isinstance(found, list) else []
    read = [_row(_named(row.get("site")), row) for row in rows[:_MAX_ROWS]]
    server = event.get("server")
    if isinstance(server, Mapping) and server:
        read.append(_row("server set", server))
    return [row for row in read if row.figures]


def _named(site: object) -> str:
    return "all sites" if site == _WHOLE else printable(site)


def _row(name: str, values: Mapping[str, Any]) -> Compared:
    figures: dict[str, dict[str, float]] = {}
    for column in COLUMNS:
        given = values.get(column)
        if not isinstance(given, Mapping):
            continue
        known = {figure: number(given.get(figure)) for figure in _FIGURES}
        figures[column] = {figure: value for figure, value in known.items() if value is not None}
    return Compared(name, number(values.get("tokens")), {c: f for c, f in figures.items() if f})


def comparison_lines(event: Mapping[str, Any]) -> list[str]:
    """The table as lines of plain text; none where there is nothing to compare."""
    rows = compared_in(event)
    if not rows:
        return []
    columns = _known(rows)
    exact = any(row.of(column, "exact_match") is not None for row in rows for column in columns)
    cells = [["", *(COLUMNS[column] for column in columns), "joining"]]
    for row in rows:
        cells.append([row.name, *(_figures(row, column, exact) for column in columns), _gain(row)])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    what = "loss, token accuracy" + (", exact match" if exact else "")
    lines = [f"did joining pay? {what} on held-out data:"]
    for first, *rest in cells:
        padded = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  " + "  ".join([first.ljust(widths[0]), *padded]))
    return lines


def comparison_card(event: Mapping[str, Any]) -> str:
    """The table as a section of the report; "" where there is nothing to compare."""
    rows = compared_in(event)
    if not rows:
        return ""
    shown = [
        figure
        for figure in _FIGURES
        if any(row.of(column, figure) is not None for row in rows for column in COLUMNS)
    ]
    columns = _known(rows)
    heads = [("", "left"), ("tokens", "")]
    heads += [
        (f"{_title(figure)}, {COLUMNS[column]}", "") for figure in shown for column in columns
    ]
    heads += [("joining", "")]
    cells = [
        (
            escape(row.name),
            format_count(row.tokens),
            *(_cell(row, column, figure) for figure in shown for column in columns),
            f'<small class="{_css(row)}">{escape(_gain(row))}</small>',
        )
        for row in rows
    ]
    caption = (
        "On data that no one trained on: the base as it came, the same site training alone "
        "(the same steps on the same examples), and the federated model"
    )
    missing = (
        ""
        if "local" in columns
        else '<p class="note">Local-only was not trained: set local-baseline=true for it.</p>'
    )
    return (
        '<section class="card long"><h2>Did joining pay?</h2>'
        f"{table_of(caption, heads, cells, 'comparison')}{missing}</section>"
    )


def _known(rows: Sequence[Compared]) -> list[str]:
    """Columns that some row has figures in."""
    return [column for column in COLUMNS if any(column in row.figures for row in rows)]


def _title(figure: str) -> str:
    return {"accuracy": "token accuracy", "exact_match": "exact match"}.get(figure, figure)


def _cell(row: Compared, column: str, figure: str) -> str:
    value = row.of(column, figure)
    if value is None:
        return MISSING
    return f"{value:.3f}" if figure == "loss" else f"{100 * value:.1f}%"


def _figures(row: Compared, column: str, exact: bool) -> str:
    if column not in row.figures:
        return MISSING
    names = _FIGURES if exact else _FIGURES[:2]
    return " ".join(_cell(row, column, figure) for figure in names)


def _gain(row: Compared) -> str:
    found = row.gain
    if found is None:
        return MISSING
    gain, column = found
    sign = "−" if gain >= 0 else "+"
    return f"loss {sign}{abs(gain):.3f} against {COLUMNS[column]}"


def _css(row: Compared) -> str:
    found = row.gain
    return "" if found is None else "down" if found[0] >= 0 else "up"
