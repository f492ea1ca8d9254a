"""Write ``docs/figures.md`` and ``docs/faults.md`` from the figures that were left.

The second one from ``make chaos`` and ``benchmarks/bench_faults.py``.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks.faults_page import page
from benchmarks.figures import REPO, output_folder

ORDER = (
    "convergence", "presets", "codecs", "inner-loop", "overhead", "server-memory", "lora",
    "lora-svd", "sft-loop",
)  # fmt: skip


def left(name: str) -> dict[str, Any] | None:
    """What a benchmark of that name left, if it has run."""
    path = output_folder() / f"{name}.json"
    record: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return record


def main() -> None:
    """Collect the pages."""
    parts = [
        "# Figures\n\nMeasured by `make bench`, which writes this page; each table side by side "
        "in one run.\n"
    ]
    for name in ORDER:
        if (record := left(name)) is not None:
            parts.append(
                f"## {record['title']}\n\n{record['text']}\n\n"
                f"Machine: {record['machine']}, Python {record['python']}.\n"
            )
    if len(parts) > 1:
        (REPO / "docs" / "figures.md").write_text("\n".join(parts))
        print("docs/figures.md written")
    if (chaos := left("chaos")) is not None:
        (REPO / "docs" / "faults.md").write_text(page(chaos, left("faults")))
        print("docs/faults.md written")


if __name__ == "__main__":
    main()
