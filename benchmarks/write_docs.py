"""Write ``docs/figures.md`` and ``docs/faults.md`` from the figures that were left.

The second one from ``make chaos`` and ``benchmarks/bench_faults.py``.  A section whose
benchmark has not run in this checkout stays as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from benchmarks.faults_page import chaos_page, faults_section
from benchmarks.figures import REPO, output_folder

__all__ = ["main", "with_sections"]

ORDER = (
    "convergence", "presets", "codecs", "inner-loop", "overhead", "server-memory", "lora",
    "lora-svd", "sft-loop", "split",
)  # fmt: skip
_FIGURES = (
    "# Figures\n\nMeasured by `make bench`, which writes this page; each table side by side "
    "in one run.\n"
)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def left(name: str) -> dict[str, Any] | None:
    """What a benchmark of that name left, if it has run."""
    path = output_folder() / f"{name}.json"
    record: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return record


def with_sections(page: str, sections: Mapping[str, str]) -> str:
    """A page with those sections (title -> text) in place of its own, new ones at the end."""
    at = [*_HEADING.finditer(page)]
    ends = [match.start() for match in at[1:]] + [len(page)] * bool(at)
    head = page[: at[0].start()] if at else page
    found = {m[1]: page[m.end() : end].strip("\n") for m, end in zip(at, ends, strict=True)}
    found |= {title: text.strip("\n") for title, text in sections.items()}
    parts = [head.rstrip("\n"), *(f"## {title}\n\n{text}" for title, text in found.items())]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Collect the pages."""
    figures, faults = REPO / "docs" / "figures.md", REPO / "docs" / "faults.md"
    measured = {
        record["title"]: f"{record['text']}\n\n"
        f"Machine: {record['machine']}, Python {record['python']}.\n"
        for name in ORDER
        if (record := left(name)) is not None
    }
    if measured:
        before = figures.read_text() if figures.exists() else _FIGURES
        figures.write_text(with_sections(before, measured))
        print("docs/figures.md written")
    chaos, cost = left("chaos"), left("faults")
    page = faults.read_text() if faults.exists() else ""
    if chaos is not None:
        page = with_sections(chaos_page(chaos), _section(page) if cost is None else {})
    if page and cost is not None:
        page = with_sections(page, faults_section(cost))
    if page and (chaos or cost):
        faults.write_text(page)
        print("docs/faults.md written")


def _section(page: str) -> dict[str, str]:
    """What the page of before says of the cost of faults."""
    _, heading, text = page.partition("\n## What faults cost\n")
    return {"What faults cost": text} if heading else {}


if __name__ == "__main__":
    main()
