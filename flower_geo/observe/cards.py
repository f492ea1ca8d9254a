"""The head and foot of the report, and its cards of plain words; every logged value is escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from flower_geo.observe.baselines import BaselineBytes
from flower_geo.observe.summary import Run, ends_of
from flower_geo.observe.units import (
    MISSING,
    format_bytes,
    format_count,
    format_ratio,
    format_seconds,
    number,
    plural,
    printable,
)

__all__ = ["config_card", "footer", "header", "places_card", "run_name", "sample_card", "tiles"]

_MAX_SAMPLE: Final = 20_000
_STATUS_WORDS: Final = {
    "completed": "Completed",
    "failed": "Failed",
    "stopped": "Stopped",
    "running": "In progress",
}
_PLACES: Final = (
    ("model", "the trained model, a Hugging Face folder"),
    ("metrics.jsonl", "every figure of this page, one event a line"),
    ("journal.jsonl", "one line a committed round, hash-chained"),
    ("checkpoints", "what a restart resumes from"),
    ("config.json", "the resolved configuration"),
)


def run_name(run: Run, folder: Path) -> str:
    """Return the name of the run: as logged, else its folder's."""
    return printable(run.start.get("run") or folder.resolve().name, 120)


def header(run: Run, title: str) -> str:
    """Title, status and one sentence on what the run is."""
    badge = run.status if run.status in _STATUS_WORDS else "stopped"
    word = _STATUS_WORDS.get(run.status, run.status)
    start = run.start
    what = [f"model {printable(start['model'], 200)}" if start.get("model") else ""]
    if run.parameters is not None:
        what.append(f"{format_count(run.parameters)} trained parameters")
    what.append(plural(len(run.sites), "site") if run.sites else "")
    if number(start.get("inner_steps")):
        what.append(f"{plural(number(start['inner_steps']) or 0, 'local step')} a round")
    codecs = [
        f"{way} {printable(start[key], 120)}"
        for way, key in (("up", "codec_up"), ("down", "codec_down"))
        if start.get(key)
    ]
    sent = f'<p class="lead">Codec {escape(", ".join(codecs))}</p>' if codecs else ""
    about = " · ".join(part for part in what if part)
    reason = run.end.get("reason") if run.end else None
    ended = (
        f'<p class="lead"><strong>{escape(word)}:</strong> {escape(printable(reason, 400))}</p>'
        if reason
        else ""
    )
    if run.end is None:
        ended = (
            '<p class="lead">No end is recorded yet: the run is going on, or its coordinator '
            f"stopped without a word. Last event {_moment(run.last_time)}.</p>"
        )
    return (
        f'<header><p class="eyebrow"><span>flower_geo · {escape(printable(start.get("strategy")))}'
        f"</span><span>{_moment(run.first_time)}</span>"
        f'<span class="badge {badge}">{escape(word)}</span></p>'
        f"<h1>{escape(title)}</h1>"
        f'<p class="lead">{escape(about)}</p>{sent}{ended}</header>'
    )


def tiles(run: Run, sent: BaselineBytes) -> str:
    """The figures to read first."""
    done, planned = _done(run)
    answers = f"{plural(sent['answers'], 'answer')} folded in"
    shown = [_tile("Rounds", f"{done:,}" + (f" of {planned:,}" if planned else ""), answers)]
    ends = ends_of(run.held_out)
    if ends:
        perplexity = f"perplexity {_perplexity(ends[0])} → {_perplexity(ends[1])}"
        shown.append(_tile("Held-out loss", f"{ends[0]:.2f} → {ends[1]:.2f}", perplexity))
    tokens = sum(row.tokens or 0 for row in run.rounds)
    busy = sum(row.seconds or 0 for row in run.rounds if row.tokens)
    rate = f"{format_count(tokens / busy)} tokens/s over all sites" if busy else ""
    shown.append(_tile("Tokens trained", format_count(tokens), rate))
    ratio = sent["per_step_gradients_ratio"]
    fewer = f"{format_ratio(ratio)} less than gradients at every step" if ratio else ""
    shown.append(_tile("Bytes sent", format_bytes(sent["sent"]), fewer))
    lives = "without a restart" if run.incarnations <= 1 else plural(run.incarnations, "start")
    shown.append(_tile("Wall time", format_seconds(run.seconds), lives))
    return f'<dl class="tiles">{"".join(shown)}</dl>'


def sample_card(run: Run) -> str:
    """What the trained model wrote, if the run got that far."""
    sample = (run.end or {}).get("sample")
    if sample is None or sample == "":
        return ""
    words = sample if isinstance(sample, str) else json.dumps(sample, ensure_ascii=False, indent=1)
    words = "\n".join(printable(line, _MAX_SAMPLE) for line in words[:_MAX_SAMPLE].splitlines())
    return (
        '<section class="card"><h2>Text from the trained model</h2>'
        f"<blockquote><p>{escape(words)}</p></blockquote></section>"
    )


def config_card(config: Mapping[str, Any]) -> str:
    """The resolved configuration, key by key."""
    if not config:
        return ""
    rows = "".join(
        f"<div><dt>{escape(printable(key))}</dt><dd><code>{escape(_value(value))}</code></dd></div>"
        for key, value in sorted(config.items())
    )
    return (
        f'<section class="card long"><h2>Configuration</h2><dl class="config">{rows}</dl></section>'
    )


def places_card(run: Run, folder: Path) -> str:
    """Where the results of the run lie; links are relative to this page."""
    rows = [f"<dt>run folder</dt><dd><code>{escape(str(folder.resolve()))}</code></dd>"]
    for name, what in _PLACES:
        path = folder / name
        if path.exists():
            slash = "/" if path.is_dir() else ""
            link = f'<a href="{quote(name)}{slash}"><code>{escape(name)}{slash}</code></a>'
            rows.append(f"<dt>{link}</dt><dd>{escape(what)}</dd>")
    elsewhere = (run.end or {}).get("model_dir")
    if elsewhere and not (folder / "model").exists():
        rows.append(f"<dt>model</dt><dd><code>{escape(printable(elsewhere, 400))}</code></dd>")
    return (
        '<section class="card"><h2>Where things lie</h2>'
        f'<dl class="pairs">{"".join(rows)}</dl></section>'
    )


def footer(run: Run) -> str:
    """When the figures are from."""
    return (
        f"<footer><p>Figures up to {_moment(run.last_time)}. Losses are natural-log cross entropy "
        "per token. Bytes are payload bytes in SI units (1 kB = 1000 B). This page loads nothing "
        "from anywhere.</p></footer>"
    )


def _moment(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, OSError, ValueError):
        return MISSING


def _done(run: Run) -> tuple[int, int | None]:
    """Return the rounds committed and the rounds planned."""
    done = max(
        [*run.held_out, *(row.round for row in run.rounds if row.seconds is not None)], default=0
    )
    planned = number(run.start.get("rounds"))
    return done, None if planned is None else int(planned)


def _tile(label: str, value: str, more: str = "") -> str:
    return (
        f'<div class="tile"><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="more">{escape(more)}</dd></div>'
    )


def _perplexity(loss: float) -> str:
    return format_count(math.exp(loss)) if loss < 40 else MISSING


def _value(value: object) -> str:
    return printable(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), 400
    )
