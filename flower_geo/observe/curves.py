"""The charts of the report: losses, bytes, and how each round ended for each site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from typing import Final

from flower_geo.observe.baselines import round_baselines
from flower_geo.observe.charts import COLOURS, Series, legend, line_chart
from flower_geo.observe.summary import Run, SiteRow, ends_of
from flower_geo.observe.units import format_bytes, format_loss, number

__all__ = ["attendance", "bytes_card", "held_out_card", "site_curves_card", "training_card"]

_MAX_SITES: Final = 64  # small charts and attendance rows; the table below them holds every site
_MAX_CELLS: Final = 120
_MIN_CELLS: Final = 24  # so that one round does not fill the whole strip
_STATUSES: Final = ("accepted", "late", "refused", "failed", "missing")

_Curve = Mapping[int, float | None]


def _points(curve: _Curve) -> list[tuple[float, float | None]]:
    return [(float(x), y) for x, y in sorted(curve.items())]


def _tick(value: float) -> str:
    return f"{value:g}"


def _bytes_tick(value: float) -> str:
    digits, unit = format_bytes(value).split(" ")
    return f"{float(digits):g} {unit}"


def _has_values(curve: _Curve) -> bool:
    return any(number(y) is not None for y in curve.values())


def _site_series(curves: Mapping[str, _Curve]) -> list[Series]:
    known = [(name, curve) for name, curve in curves.items() if _has_values(curve)]
    role = "plain" if len(known) <= COLOURS else "quiet"
    return [Series(name, _points(curve), i, role) for i, (name, curve) in enumerate(known)]


def _shown_in_legend(series: Sequence[Series], what: str) -> list[Series]:
    quiet = [s for s in series if s.role == "quiet"]
    rest = [s for s in series if s.role != "quiet"]
    rest.sort(key=lambda s: s.role != "main")
    return rest + ([Series(f"each of {len(quiet)} {what}", [], 0, "quiet")] if quiet else [])


def _fall(curve: _Curve, what: str) -> str:
    ends = ends_of(curve)
    if ends is None:
        return f"No {what} recorded yet."
    return f"{what.capitalize()} went from {format_loss(ends[0])} to {format_loss(ends[1])}."


def held_out_card(run: Run) -> str:
    """Held-out loss of the global model, over all sites and on each site's own text."""
    series = _site_series({name: site.curve for name, site in run.sites.items()})
    if _has_values(run.held_out):
        series.append(Series("all sites", _points(run.held_out), 0, "main"))
    chart = line_chart(
        series,
        title="Held-out loss of the global model by rounds committed",
        summary=_fall(run.held_out, "loss over all sites"),
        x_label="rounds committed",
        y_label="held-out loss, nats per token",
        y_format=format_loss,
        tick_format=_tick,
        height=300,
    )
    return (
        '<section class="card"><h2>Held-out loss</h2>'
        '<p class="note">The global model on text no site trains on, weighted by tokens over all '
        "sites, and on each site's own held-out text.</p>"
        f"{legend(_shown_in_legend(series, 'sites')) if series else ''}{chart}</section>"
    )


def training_card(run: Run) -> str:
    """Training loss by round, mean over sites and for each site."""
    series = _site_series({name: site.train_loss for name, site in run.sites.items()})
    mean = {row.round: row.train_loss for row in run.rounds}
    if _has_values(mean):
        series.append(Series("mean of sites", _points(mean), 0, "main"))
    chart = line_chart(
        series,
        title="Training loss by round",
        summary=_fall(mean, "mean training loss"),
        x_label="round",
        y_label="training loss, nats per token",
        y_format=format_loss,
        tick_format=_tick,
    )
    return (
        '<section class="card"><h2>Training loss</h2>'
        '<p class="note">Mean over the local steps of a round.</p>'
        f"{legend(_shown_in_legend(series, 'sites')) if series else ''}{chart}</section>"
    )


def bytes_card(run: Run) -> str:
    """Bytes sent so far by round, beside what both baselines would have sent by then."""
    rounds = [row.round for row in run.rounds]

    def running(values: Sequence[float]) -> list[tuple[float, float | None]]:
        return [(float(r), total) for r, total in zip(rounds, accumulate(values), strict=True)]

    series = [
        Series("sent down to sites", running([row.bytes_down for row in run.rounds]), 2),
        Series("sent up by sites", running([row.bytes_up for row in run.rounds]), 0),
    ]
    if run.parameters is not None:
        pairs = [round_baselines(row, run.parameters) for row in run.rounds]
        series = [
            Series("gradients at every step, fp32", running([pair[1] for pair in pairs]), 1),
            Series("FedAvg, fp32", running([pair[0] for pair in pairs]), 3),
            *series,
        ]
    series = [s for s in series if any(y for _, y in s.points)]
    up, down = (sum(getattr(row, key) for row in run.rounds) for key in ("bytes_up", "bytes_down"))
    chart = line_chart(
        series,
        title="Bytes sent since the start, by round, on a logarithmic scale",
        summary=f"{format_bytes(up)} went up and {format_bytes(down)} went down.",
        x_label="round",
        y_label="bytes since the start, all sites (log scale)",
        y_format=format_bytes,
        tick_format=_bytes_tick,
        log=True,
    )
    return (
        '<section class="card"><h2>Bytes sent</h2>'
        '<p class="note">As measured, and as the two baselines would have needed for the same '
        "answers and steps.</p>"
        f"{legend(series) if series else ''}{chart}</section>"
    )


def site_curves_card(run: Run) -> str:
    """A small chart a site: global model, and the site's own model after its local steps."""
    sites = [s for s in run.sites.values() if _has_values(s.curve) or _has_values(s.loss_after)]
    if not sites:
        return ""
    shown = sites[:_MAX_SITES]
    curves = [c for s in shown for c in (s.curve, s.loss_after)]
    values = [y for c in curves for y in c.values() if y is not None]
    rounds = [x for c in curves for x in c]
    if not values:
        return ""
    x_range, y_range = (min(rounds), max(rounds)), (min(values), max(values))
    charts = "".join(_site_chart(site, x_range, y_range) for site in shown)
    key = [Series("global model", [], 0), Series("after the site's local steps", [], 1, "marks")]
    more = len(sites) - len(shown)
    rest = f'<p class="note">And {more} more sites, in the table.</p>' if more else ""
    return (
        '<section class="card long"><h2>Held-out loss at each site</h2>'
        '<p class="note">Before and after local training, on its own held-out text, in nats '
        "per token by rounds committed. All charts share one scale.</p>"
        f'{legend(key)}<div class="grid-of-sites">{charts}</div>{rest}</section>'
    )


def _site_chart(site: SiteRow, x_range: tuple[int, int], y_range: tuple[float, float]) -> str:
    ends = ends_of(site.curve)
    name = escape(site.name)
    change = "" if ends is None else f"{format_loss(ends[0])} → {format_loss(ends[1])}"
    chart = line_chart(
        [
            Series("after local steps", _points(site.loss_after), 1, "marks"),
            Series("global model", _points(site.curve), 0),
        ],
        title=f"Held-out loss at {site.name}",
        summary=_fall(site.curve, "loss of the global model"),
        x_label="rounds committed",
        y_label="",
        y_format=format_loss,
        tick_format=_tick,
        height=110,
        small=True,
        x_range=x_range,
        y_range=y_range,
    )
    return (
        f'<div><div class="site-head"><h3 title="{name}">{name}</h3><span>{change}</span></div>'
        f"{chart}</div>"
    )


def attendance(run: Run) -> str:
    """A strip a site with one cell a round: how its answer fared."""
    rounds = sorted({round_ for site in run.sites.values() for round_ in site.status})
    if not rounds:
        return ""
    step = -(-len(rounds) // _MAX_CELLS)
    bins = [rounds[i : i + step] for i in range(0, len(rounds), step)]
    rows = "".join(
        f"<span>{escape(site.name)}</span>{_strip(site, bins)}"
        for site in list(run.sites.values())[:_MAX_SITES]
    )
    used = {status for site in run.sites.values() for status in site.status.values()}
    key = "".join(
        f'<li><svg class="key" width="14" height="14" aria-hidden="true">{_cell(status, 1, 12, 14)}'
        f"</svg>{status}</li>"
        for status in _STATUSES
        if status in used
    )
    each = "" if step == 1 else f" Each cell stands for {step} rounds and shows the worst."
    return (
        f'<p class="note">Rounds {rounds[0]:,} to {rounds[-1]:,}, one row a site.{each}</p>'
        f'<ul class="legend">{key}</ul><div class="strip">{rows}</div>'
    )


def _strip(site: SiteRow, bins: Sequence[Sequence[int]]) -> str:
    width = 100 / max(len(bins), _MIN_CELLS)
    cells, counts = [], dict.fromkeys(_STATUSES, 0)
    for i, some in enumerate(bins):
        found = [site.status[r] for r in some if r in site.status]
        for status in found:
            counts[status] = counts.get(status, 0) + 1
        worst = max(found, key=_severity, default="none")
        where = f"round {some[0]:,}" if len(some) == 1 else f"rounds {some[0]:,} to {some[-1]:,}"
        told = "not asked" if worst == "none" else worst
        cells.append(
            f'<svg x="{i * width:.3f}%" width="{width:.3f}%" height="16"><title>'
            f"{escape(f'{site.name}, {where}: {told}')}</title>{_cell(worst, 4, 92, 16, '%')}</svg>"
        )
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    name = escape(f"{site.name}: {said or 'not asked yet'}")
    return f'<svg width="100%" height="16" role="img" aria-label="{name}">{"".join(cells)}</svg>'


def _severity(status: str) -> int:
    return _STATUSES.index(status) if status in _STATUSES else len(_STATUSES)


def _cell(status: str, x: float, width: float, height: float, unit: str = "") -> str:
    """A cell whose height differs with its status too, for readers who see no colour."""
    known = status if status in (*_STATUSES, "none") else "failed"
    tall = {"accepted": 1.0, "late": 0.6, "refused": 0.35, "failed": 0.35, "missing": 0.6}
    h = max(3.0, (height - 2) * tall.get(known, 0.15))
    y = height - 1 - h
    at = f'x="{x:g}{unit}" y="{y:.1f}" width="{width:g}{unit}" height="{h:.1f}"'
    return f'<rect class="s-{known}" {at} rx="1.5"/>'
