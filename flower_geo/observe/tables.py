"""The tables of the report: bytes, sites, faults, rounds; every logged value is escaped here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Final

from flower_geo.observe.baselines import BYTES_PER_VALUE, BaselineBytes
from flower_geo.observe.html import table_of
from flower_geo.observe.summary import Fault, RoundRow, Run, SiteRow, ends_of
from flower_geo.observe.units import (
    MISSING,
    format_bytes,
    format_count,
    format_loss,
    format_ratio,
    format_seconds,
    plural,
)

__all__ = ["bytes_table", "faults_card", "rounds_table", "sites_table"]

_MAX_FAULTS: Final = 200
_MAX_ROUNDS: Final = 200


def bytes_table(sent: BaselineBytes) -> str:
    """Totals with ratios, and the formulas they rest on."""
    lines = (
        ("This run, as measured", sent["sent"], None, "sent"),
        ("FedAvg, fp32", sent["fp32_fedavg"], sent["fp32_fedavg_ratio"], ""),
        (
            "Gradients at every step, fp32",
            sent["per_step_gradients"],
            sent["per_step_gradients_ratio"],
            "",
        ),
    )
    top = max([amount for _, amount, _, _ in lines if amount], default=1.0)
    rows = [
        (
            escape(name),
            f"{format_bytes(amount)} <small>({format_bytes(amount, binary=True)})</small>"
            if amount is not None
            else MISSING,
            format_ratio(ratio) if css != "sent" else "1×",
            f'<span class="bar {css}" style="width:{100 * amount / top:.2f}%"></span>'
            if amount
            else "",
        )
        for name, amount, ratio, css in lines
    ]
    table = table_of(
        "Totals over all sites and both ways",
        (("", "left"), ("bytes", ""), ("against this run", ""), ("to scale", "left bars")),
        rows,
        "byte-totals",
    )
    size = f"{sent['parameters']:,.0f}" if sent["parameters"] else "P"
    answers, steps = plural(sent["answers"], "accepted answer"), plural(sent["steps"], "local step")
    both = f"2 ways × {BYTES_PER_VALUE} bytes × {size} parameters"
    return (
        f'<section class="card"><h2>Bytes against baselines</h2>{table}'
        f'<p class="note">FedAvg, fp32 = {answers} × {both}: the '
        "whole model down and up for each. Gradients at every step, fp32 = "
        f"{steps} × {both}: a gradient up and the mean gradient down for "
        "each. A baseline in bf16 would send half. The figure of this run is "
        f"{format_bytes(sent['sent_up'])} up and {format_bytes(sent['sent_down'])} down, and also "
        "counts replies that were late or refused and rounds that had to be done again.</p>"
        "</section>"
    )


def sites_table(run: Run) -> str:
    """One row a site."""
    rows = [
        (
            escape(site.name),
            escape(site.data or MISSING),
            f"{site.rounds_answered:,} of {site.rounds_asked:,}",
            format_count(site.tokens),
            format_seconds(site.seconds),
            format_count(site.tokens / site.seconds) if site.seconds else MISSING,
            format_bytes(site.bytes_up or None),
            format_bytes(site.bytes_down or None),
            _codecs(site),
            _line(site),
            _change(site),
            _not_accepted(site),
        )
        for site in run.sites.values()
    ]
    heads = (
        ("site", "left"),
        ("data", "left wrap"),
        ("rounds answered", ""),
        ("tokens", ""),
        ("training time", ""),
        ("tokens/s", ""),
        ("bytes up", ""),
        ("bytes down", ""),
        ("codec up", "left wrap"),
        ("line, up / down", ""),
        ("held-out loss, first → last", ""),
        ("not counted", "wrap"),
    )
    if not rows:
        return (
            '<section class="card"><h2>Sites</h2><p class="empty">No site has answered yet.</p>'
            "</section>"
        )
    table = table_of(
        "Held-out loss in nats per token, of the global model; answers not counted over all tries",
        heads,
        rows,
        "sites",
    )
    return f'<section class="card long"><h2>Sites</h2>{table}</section>'


def faults_card(run: Run, attendance: str) -> str:
    """What went wrong and was outlived, and how each round ended for each site."""
    counts = Counter(fault.what for fault in run.faults)
    turned_down: Counter[str] = Counter()
    for site in run.sites.values():
        turned_down.update(site.not_accepted)
    told = [f"{count:,} × {what}" for what, count in counts.most_common(12)]
    told += [f"{plural(n, 'answer')} {status}" for status, n in turned_down.most_common(12)]
    lead = escape(" · ".join(told)) or "None: every site answered every round it was asked for."
    tables = _faults(run, run.faults, "faults") + _faults(
        run, run.turned_down, "answers not counted"
    )
    return (
        f'<section class="card long"><h2>Faults survived</h2><p>{lead}</p>{attendance}{tables}'
        "</section>"
    )


def _faults(run: Run, found: Sequence[Fault], name: str) -> str:
    """The newest of these, a row each; nothing where there are none."""
    if not found:
        return ""
    newest, began = found[-_MAX_FAULTS:], run.first_time
    rows = [
        (
            MISSING if fault.round is None else f"{fault.round:,}",
            MISSING if fault.time is None or began is None else format_seconds(fault.time - began),
            escape(fault.site or MISSING),
            escape(fault.what),
            escape(fault.detail or ""),
        )
        for fault in newest
    ]
    left = len(found) - len(newest)
    caption = (
        f"The newest {len(newest)} {name}; {left:,} earlier ones are in metrics.jsonl"
        if left
        else f"All {name}"
    )
    heads = (
        ("round", "left"),
        ("after", ""),
        ("site", "left"),
        ("what", "left"),
        ("detail", "left wrap detail"),
    )
    return table_of(caption, heads, rows)


def rounds_table(run: Run) -> str:
    """The numbers behind the curves, at most a few hundred rows of them."""
    if not run.rounds:
        return ""
    step = -(-len(run.rounds) // _MAX_ROUNDS)
    rows: list[RoundRow] = run.rounds[::-1][::step][::-1]  # evenly, and the newest always
    cells = [
        (
            f"{row.round:,}",
            f"{_or_dash(row.accepted)} of {_or_dash(row.asked)}",
            format_loss(row.train_loss),
            format_loss(run.held_out.get(row.round)),
            format_count(row.tokens),
            format_count(row.tokens_per_second),
            format_seconds(row.seconds),
            format_bytes(row.bytes_up),
            format_bytes(row.bytes_down),
        )
        for row in rows
    ]
    heads = (
        ("round", "left"),
        ("accepted", ""),
        ("training loss", ""),
        ("held-out loss", ""),
        ("tokens", ""),
        ("tokens/s", ""),
        ("time", ""),
        ("bytes up", ""),
        ("bytes down", ""),
    )
    caption = "Every round" if step == 1 else f"Every {step}th round"
    return (
        '<section class="card long"><h2>Rounds</h2><details><summary>Show the numbers behind the '
        f"curves</summary>{table_of(caption, heads, cells)}</details></section>"
    )


def _change(site: SiteRow) -> str:
    ends = ends_of(site.curve)
    if ends is None:
        return MISSING
    css, sign = ("down", "−") if ends[1] <= ends[0] else ("up", "+")
    return (
        f"{format_loss(ends[0])} → {format_loss(ends[1])} "
        f'<small class="{css}">{sign}{abs(ends[1] - ends[0]):.3f}</small>'
    )


def _codecs(site: SiteRow) -> str:
    """The newest codec, and how often another took over."""
    if not site.codecs:
        return MISSING
    changes = len(site.codecs) - 1
    count = f" <small>{plural(changes, 'change')}</small>" if changes else ""
    return f"{escape(site.codecs[-1])}{count}"


def _line(site: SiteRow) -> str:
    if site.speed_up is None and site.speed_down is None:
        return MISSING
    ways = (format_bytes(speed) for speed in (site.speed_up, site.speed_down))
    return " / ".join(ways) + " a second"


def _not_accepted(site: SiteRow) -> str:
    counts = sorted(site.not_accepted.items())
    return escape(", ".join(f"{count}\u00a0{status}" for status, count in counts)) or "none"


def _or_dash(value: int | None) -> str:
    return MISSING if value is None else f"{value:,}"
