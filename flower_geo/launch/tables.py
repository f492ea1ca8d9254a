"""Tables of the command: on a terminal, in a pipe, in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["markdown_table", "print_table"]


def print_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere whole lines in columns, whatever their width."""
    console = Console()
    if console.is_terminal:
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0)
        table.add_column(heads[0], overflow="fold")
        for head in heads[1:]:
            table.add_column(head, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(*(escape(cell) for cell in row))
        console.print(table)
        return
    lines = [heads, *rows]
    widths = [max(len(line[number]) for line in lines) for number in range(len(heads))]
    print(title)
    for line in lines:
        first, *others = (cell.ljust(widths[0]) if not n else cell.rjust(widths[n])
                          for n, cell in enumerate(line))  # fmt: skip
        print("  ".join([first, *others]))


def markdown_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as Markdown: the first column to the left, the others to the right."""
    marks = ["---", *["---:"] * (len(heads) - 1)]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in (heads, marks, *rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
