"""Where benchmarks leave their figures, and how they print them."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

REPO = Path(__file__).resolve().parents[1]


def output_folder() -> Path:
    """Folder of the JSON figures, made when missing."""
    folder = Path(os.environ.get("FLOWER_GEO_ARTEFACTS", REPO / "artefacts")) / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; floats with four significant digits."""
    cells = [[_cell(value) for value in row] for row in rows]
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in cells])


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|")  # a bar would end the cell, within code too


def publish(name: str, title: str, text: str, figures: Any) -> None:
    """Print a benchmark's page and keep it for ``benchmarks/write_docs.py``."""
    print(f"\n## {title}\n\n{text}\n", flush=True)
    record = {
        "name": name, "title": title, "text": text, "figures": figures,
        "command": "make bench", "python": platform.python_version(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
    }  # fmt: skip
    (output_folder() / f"{name}.json").write_text(json.dumps(record, indent=1))


class Kept:
    """Results on disk, so that an interrupted benchmark goes on.

    Results that no clock is part of may also lie in ``benchmarks/results``, where they
    are kept with the code.

    Args:
        name: of the file.
        resume: use what an earlier call has measured.
    """

    def __init__(self, name: str, resume: bool) -> None:
        self.path = output_folder() / f"{name}.json"
        self.results: dict[str, Any] = {}
        for path in (REPO / "benchmarks" / "results" / self.path.name, self.path):
            if resume and path.exists():
                self.results |= json.loads(path.read_text())
        self.lock = Lock()

    def get(self, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of that key, measured now unless it is known."""
        if key not in self.results:
            found = measure()
            with self.lock:
                self.results[key] = found
                self.path.write_text(json.dumps(self.results, indent=1))
            print(key, json.dumps(found), flush=True)
        known: dict[str, Any] = self.results[key]
        return known


def run_python(code: str, *arguments: str, **environment: str) -> Any:
    """Run ``code`` in a new interpreter with one thread; return the JSON it prints last."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=REPO, capture_output=True, text=True, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def simulate(sites: int, values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run ``apps/diloco`` as people do, in simulation, with these keys; return its metrics."""
    with tempfile.TemporaryDirectory() as folder:
        own = {**values, "run-name": "bench", "run-dir": folder}
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in own.items())
        subprocess.run(
            [
                str(Path(sys.executable).with_name("flower-geo")), "run",
                str(REPO / "apps/diloco"), "--sites", str(sites), "--plain",
                "--run-config", config,
            ],
            check=True, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        lines = (Path(folder) / "bench" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
