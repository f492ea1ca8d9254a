"""Line charts as inline SVG that stretch to their place while text keeps its size.

A chart has no fixed aspect ratio: ticks, labels and markers sit at percentages
of the plot, and only the lines live in a stretched view box, with strokes that
do not scale.  So one drawing serves a wide screen, a phone and paper.
Colours come from the style sheet (classes ``c0`` .. ``c5``); each colour has a
marker shape of its own, so that no reading depends on colour.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from flower_geo.observe.units import number

__all__ = ["COLOURS", "Scale", "Series", "legend", "line_chart", "linear_scale", "log_scale"]

COLOURS: Final = 6
"""Series styles before they repeat."""

_MAX_POINTS: Final = 400  # a line keeps at most this many; the eye sees no more
_MAX_MARKERS: Final = 40  # beyond it, markers would hide the line: a few then tell it by shape
_FEW_MARKERS: Final = 12
_VIEW: Final = 1000.0

# Drawn around (0, 0), in pixels; all of about the same area.
_MARKERS: Final = (
    '<circle r="3.4"/>',
    '<rect x="-3" y="-3" width="6" height="6"/>',
    '<path d="M0-4.2 4 3-4 3z"/>',
    '<path d="M0-4.4 4.4 0 0 4.4-4.4 0z"/>',
    '<path d="M0 4.2 4-3-4-3z"/>',
    '<path d="M-4-1.3h2.7v-2.7h2.6v2.7h2.7v2.6h-2.7v2.7h-2.6v-2.7h-2.7z"/>',
)


@dataclass(frozen=True)
class Series:
    """One named line.

    Attributes:
        name: Shown in the legend and on hover; any text.
        points: (x, y) by rising x; a y that is None, NaN or infinite breaks the line.
        style: Index of colour and marker.
        role: ``main`` (bold), ``plain``, ``quiet`` (thin and grey, one of many) or
            ``marks`` (hollow markers without a line).
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    style: int = 0
    role: str = "plain"

    @property
    def css(self) -> str:
        """Classes of the style sheet that this series is drawn with."""
        return f"series {self.role} c{self.style % COLOURS}"

    @property
    def marker(self) -> str:
        """SVG of one marker, around the origin."""
        return _MARKERS[0 if self.role == "main" else self.style % len(_MARKERS)]


@dataclass(frozen=True)
class Scale:
    """Maps values to 0..1 and names its ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return where ``value`` lies between ``low`` (0) and ``high`` (1)."""
        if self.log:
            low, high, value = math.log10(self.low), math.log10(self.high), math.log10(value)
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low)


def linear_scale(low: float, high: float, ticks: int = 5, *, whole: bool = False) -> Scale:
    """Return a scale around [low, high] with about ``ticks`` round tick values.

    With ``whole`` the ticks are integers and the ends stay where the data ends.
    """
    # Closer than their own rounding, two values are one.
    if not high - low > 1e-12 * max(abs(low), abs(high), 1e-300):
        if whole:
            return Scale(low - 0.5, low + 0.5, (low,))
        pad = max(abs(low) * 0.05, 0.5)
        low, high = low - pad, low + pad
    raw = (high - low) / max(ticks, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.floor(low / step) if not whole else math.ceil(low / step)
    last = math.ceil(high / step) if not whole else math.floor(high / step)
    values = tuple(float(f"{i * step:.12g}") for i in range(first, last + 1))
    if whole:
        return Scale(low, high, values)
    return Scale(min(low, values[0]), max(high, values[-1]), values)


def log_scale(low: float, high: float, ticks: int = 6) -> Scale:
    """Return a logarithmic scale from the decade below ``low`` to the decade above ``high``."""
    first = math.floor(math.log10(low))
    last = max(math.ceil(math.log10(high)), first + 1)
    step = max(1, math.ceil((last - first) / ticks))
    return Scale(
        10.0**first, 10.0**last, tuple(10.0**e for e in range(first, last + 1, step)), True
    )


def legend(series: Iterable[Series]) -> str:
    """Return an HTML list that names every series beside a piece of its line."""
    items = "".join(
        f'<li><svg class="key" width="28" height="12" aria-hidden="true"><g class="{s.css}">'
        + ("" if s.role == "marks" else '<line x1="1" x2="27" y1="6" y2="6"/>')
        + ("" if s.role == "quiet" else f'<g transform="translate(14 6)">{s.marker}</g>')
        + f"</g></svg>{escape(s.name)}</li>"
        for s in series
    )
    return f'<ul class="legend">{items}</ul>'


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    summary: str,
    x_label: str,
    y_label: str,
    y_format: Callable[[float], str],
    tick_format: Callable[[float], str] | None = None,
    log: bool = False,
    height: int = 280,
    small: bool = False,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
) -> str:
    """Return one chart as HTML (axis labels, SVG, hover data in attributes).

    Args:
        series: Lines, the last one drawn on top.
        title: Names the drawing for a screen reader.
        summary: Says in a sentence what the drawing shows, for a screen reader.
        x_label: What x counts; x values are whole numbers.
        y_label: What y measures, with its unit.
        y_format: Writes a y value.
        tick_format: Writes a tick of the y axis, where shorter than ``y_format``.
        log: Use a logarithmic y axis; values that are not positive break the line.
        height: Of the plot, in CSS pixels.
        small: Leave out axis labels and most ticks, for a grid of charts.
        x_range: Smallest and largest x, where not those of the data.
        y_range: The same for y.
    """
    clean = [(s, _thin(_usable(s.points, log))) for s in series]
    known = [(x, y) for _, points in clean for x, y in points if y is not None]
    if not known:
        return '<p class="empty">Nothing recorded yet.</p>'
    x_low, x_high = x_range or (min(x for x, _ in known), max(x for x, _ in known))
    y_low, y_high = y_range or (min(y for _, y in known), max(y for _, y in known))
    xs = linear_scale(x_low, x_high, 3 if small else 6, whole=True)
    ys = log_scale(y_low, y_high) if log else linear_scale(y_low, y_high, 3 if small else 5)

    write_tick = tick_format or y_format
    grid = []
    for tick in ys.ticks:
        at = _percent(1 - ys.at(tick))
        grid.append(f'<line class="grid" x1="0" x2="100%" y1="{at}" y2="{at}"/>')
        label = escape(write_tick(tick))
        grid.append(f'<text class="tick y" x="-8" y="{at}" dy=".33em">{label}</text>')
    for tick in xs.ticks:
        at = _percent(xs.at(tick))
        grid.append(f'<text class="tick x" x="{at}" y="100%" dy="1.5em">{tick:,.0f}</text>')
    grid.append('<line class="axis" x1="0" x2="100%" y1="100%" y2="100%"/>')

    lines, marks = [], []
    for one, points in clean:
        lines.append(_line(one, points, xs, ys))
        marks.append(_marks(one, points, xs, ys, y_format, _FEW_MARKERS if small else _MAX_MARKERS))
    labels = "" if small else f'<p class="axis-label">{escape(y_label)}</p>'
    under = "" if small else f'<p class="axis-label x">{escape(x_label)}</p>'
    name = f"{title}. {summary}"
    return (
        f'<div class="chart{" small" if small else ""}" data-x-label="{escape(x_label)}">{labels}'
        f'<div class="plot"><svg class="figure" width="100%" height="{height}" role="img" '
        f'aria-label="{escape(name)}"><rect width="100%" height="100%" fill="none" '
        f'pointer-events="all"/>{"".join(grid)}'
        f'<svg width="100%" height="100%" viewBox="0 0 {_VIEW:.0f} {_VIEW:.0f}" '
        f'preserveAspectRatio="none" overflow="visible">{"".join(lines)}</svg>'
        f"{''.join(marks)}</svg></div>{under}</div>"
    )


def _usable(
    points: Iterable[tuple[float, float | None]], log: bool
) -> list[tuple[float, float | None]]:
    kept: list[tuple[float, float | None]] = []
    for x, value in points:
        y = number(value)
        kept.append((x, None if y is None or (log and y <= 0) else y))
    return kept


def _thin(points: list[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
    """Keep the lowest and highest point of each of many equal pieces, and both ends."""
    if len(points) <= _MAX_POINTS:
        return points
    kept = {0, len(points) - 1}
    piece = len(points) / (_MAX_POINTS / 2)
    for i in range(_MAX_POINTS // 2):
        inside = range(round(i * piece), min(round((i + 1) * piece), len(points)))
        values = [(y, j) for j in inside if (y := points[j][1]) is not None]
        if values:
            kept |= {min(values)[1], max(values)[1]}
        elif inside:
            kept.add(inside[0])  # so that a gap stays a gap
    return [points[j] for j in sorted(kept)]


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%".replace(".00%", "%")


def _line(one: Series, points: list[tuple[float, float | None]], xs: Scale, ys: Scale) -> str:
    if one.role == "marks":
        return ""
    path, pen_down = [], False
    for x, y in points:
        if y is None:
            pen_down = False
            continue
        path.append(
            f"{'L' if pen_down else 'M'}{xs.at(x) * _VIEW:.1f} {(1 - ys.at(y)) * _VIEW:.1f}"
        )
        pen_down = True
    return f'<g class="{one.css}"><path class="curve" d="{"".join(path)}"/></g>'


def _marks(
    one: Series,
    points: list[tuple[float, float | None]],
    xs: Scale,
    ys: Scale,
    y_format: Callable[[float], str],
    most: int,
) -> str:
    """Markers, each with a native tooltip, and the values for the script that shows them."""
    known = [(x, y) for x, y in points if y is not None]
    if one.role == "quiet":  # one of many: a small chart of its own shows its values
        drawn = []
    elif len(known) <= most:
        drawn = known
    else:
        drawn = known[:: -(-len(known) // _FEW_MARKERS)]
    dots = "".join(
        f'<svg class="point" x="{_percent(xs.at(x))}" y="{_percent(1 - ys.at(y))}" '
        f'overflow="visible"><title>{escape(one.name)}, {x:,.0f}: {escape(y_format(y))}</title>'
        f"{one.marker}</svg>"
        for x, y in drawn
    )
    values = [
        [x, round(100 * xs.at(x), 2), round(100 * (1 - ys.at(y)), 2), y_format(y)] for x, y in known
    ]
    data = escape(json.dumps(values, separators=(",", ":")))
    return f'<g class="{one.css}" data-name="{escape(one.name)}" data-points="{data}">{dots}</g>'
