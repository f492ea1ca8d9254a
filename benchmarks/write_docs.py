"""Write ``docs/figures.md`` from the figures the benchmarks left."""

from __future__ import annotations

import json

from benchmarks.figures import REPO, output_folder

ORDER = ("convergence", "presets", "codecs", "inner-loop", "overhead", "server-memory")


def main() -> None:
    """Collect the pages."""
    parts = [
        "# Figures\n\nMeasured by `make bench`, which writes this page; each table side by side "
        "in one run.\n"
    ]
    for name in ORDER:
        path = output_folder() / f"{name}.json"
        if path.exists():
            record = json.loads(path.read_text())
            parts.append(
                f"## {record['title']}\n\n{record['text']}\n\n"
                f"Machine: {record['machine']}, Python {record['python']}.\n"
            )
    (REPO / "docs" / "figures.md").write_text("\n".join(parts))
    print("docs/figures.md written")


if __name__ == "__main__":
    main()
