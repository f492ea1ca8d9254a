"""The report of a run: one HTML page that needs nothing but itself.

The page loads no file, font or script from anywhere, and a content policy in its
head forbids it to: even a name that slipped through escaping could run no code.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from flower_geo.errors import StateError
from flower_geo.observe import cards, curves, tables
from flower_geo.observe.baselines import compare
from flower_geo.observe.comparison import comparison_card
from flower_geo.observe.metrics import read_metrics
from flower_geo.observe.summary import Run, summarise

__all__ = ["build_page", "write_report"]

_METRICS: Final = "metrics.jsonl"
_CONFIG: Final = "config.json"
_REPORT: Final = "report.html"


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write ``report.html`` into a run folder, from what its log holds so far.

    Works on a run that is still going, was cut off, or has no config.json. The
    page is replaced in one step, so a browser never sees half of it.

    Args:
        run_dir: Folder with ``metrics.jsonl``.

    Returns:
        The path of the page.

    Raises:
        StateError: There is no metrics.jsonl there, or the page cannot be written.
    """
    folder = Path(run_dir)
    log = folder / _METRICS
    if not log.is_file():
        raise StateError(
            f"no {_METRICS} in {folder}; give the folder of a run that has started, "
            "for example runs/<run-name>"
        )
    page = build_page(summarise(read_metrics(log)), _read_config(folder / _CONFIG), folder)
    target = folder / _REPORT
    try:
        _replace(target, page)
    except OSError as error:
        raise StateError(
            f"cannot write {target}: {error.strerror or error}; free space or make it writable"
        ) from error
    return target


def build_page(run: Run, config: Mapping[str, Any], folder: Path) -> str:
    """Return the whole page as text.

    Args:
        run: What the log says.
        config: Resolved configuration, any JSON values.
        folder: The run folder, to name what lies in it.
    """
    assets = files("flower_geo.observe")
    style = assets.joinpath("report.css").read_text(encoding="utf-8")
    script = assets.joinpath("report.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'; "
        f"script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    )
    title = cards.run_name(run, folder)
    byte_totals = compare(run)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(policy)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)} – flower_geo</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        + "\n".join(
            [
                cards.header(run, title),
                "<main>",
                cards.tiles(run, byte_totals),
                curves.held_out_card(run),
                f'<div class="pair">{curves.training_card(run)}{curves.bytes_card(run)}</div>',
                comparison_card(run.comparison),
                tables.bytes_table(byte_totals),
                curves.site_curves_card(run),
                tables.sites_table(run),
                tables.faults_card(run, curves.attendance(run)),
                cards.sample_card(run),
                tables.rounds_table(run),
                cards.config_card(config),
                cards.places_card(run, folder),
                "</main>",
                cards.footer(run),
            ]
        )
        + f"\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}  # the report is about the run; a config that is not there yet costs one section
    return config if isinstance(config, dict) else {}


def _replace(target: Path, page: str) -> None:
    handle, name = tempfile.mkstemp(prefix=".report-", suffix=".html", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(page)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
