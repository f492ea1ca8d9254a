"""Live progress of a run: a display that redraws itself on a terminal, plain lines elsewhere.

Events come from another process and hold names that sites chose, so nothing in
them is taken for granted: a key may be missing, null or of another type, and a
name may carry terminal escapes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from flower_geo.observe.comparison import comparison_lines
from flower_geo.observe.units import (
    MISSING,
    format_bytes,
    format_count,
    format_loss,
    format_seconds,
    number,
    plural,
    printable,
)

__all__ = ["Progress"]

_RECENT: Final = 5  # rounds that the time left is judged by
_NAMES: Final = 4  # pending sites named before the rest is only counted
_FAULTS: Final = 3


class Progress:
    """Shows a run while it goes on; a context manager.

    Args:
        console: Where to write; standard output by default.
        total_rounds: Rounds planned, until a ``start`` event says so.
        live: Redraw in place. By default only where the output is a terminal.
    """

    def __init__(
        self,
        console: Console | None = None,
        total_rounds: int | None = None,
        *,
        live: bool | None = None,
    ) -> None:
        self.console = console if console is not None else Console()
        # CI services often ask for colours on what is no terminal: look at the file itself.
        isatty = getattr(self.console.file, "isatty", None)
        at_terminal = self.console.is_interactive and callable(isatty) and bool(isatty())
        self._state = _State(total_rounds)
        self._live: Live | None = None
        if at_terminal if live is None else live:
            self._live = Live(
                console=self.console,
                refresh_per_second=4,
                get_renderable=self._state.render,
                redirect_stdout=False,
                redirect_stderr=False,
            )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in one event of the metrics log; events it does not know change nothing."""
        line = self._state.add(event)
        if line and self._live is None:
            self.note(line)
        elif self._live is not None and event.get("event") in ("round", "end"):
            self._live.refresh()

    def note(self, line: str) -> None:
        """Print a line; with a live display it appears above it."""
        self.console.print(Text(line), soft_wrap=True)


class _State:
    """What is known of the run by now."""

    def __init__(self, total_rounds: int | None) -> None:
        self.total = total_rounds
        self.title = "waiting for the first event"
        self.done = 0
        self.round = 0
        self.asked = 0
        self.answered: dict[str, str] = {}
        self.pending: list[str] = []
        self.held_out: float | None = None
        self.train_loss: float | None = None
        self.rate: float | None = None
        self.up = 0.0
        self.down = 0.0
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.faults: deque[str] = deque(maxlen=_FAULTS)
        self.comparison: list[str] = []
        self.ended: str | None = None
        self._sites: list[str] = []
        self._began = time.monotonic()
        self._round_began = self._began
        self._last_commit: float | None = None

    # -- taking in ---------------------------------------------------------------

    def add(self, event: Mapping[str, Any]) -> str | None:
        """Fold one event in and return a line about it, for those events that get one."""
        handler = {
            "start": self._start,
            "sites": self._connected,
            "waiting": self._waiting,
            "site": self._site,
            "round": self._round,
            "eval": self._eval,
            "evaluation": self._evaluation,
            "server": self._server,
            "comparison": self._comparison,
            "fault": self._fault,
            "end": self._end,
        }.get(str(event.get("event")))
        return handler(event) if handler is not None else None

    def _start(self, event: Mapping[str, Any]) -> str:
        planned = _whole(event.get("rounds"))
        if planned is not None:
            self.total = planned
        self._sites = _names(event.get("sites"))
        self.asked = len(self._sites)
        words = [printable(event.get("run"), 60), printable(event.get("strategy"), 40)]
        if event.get("model"):
            size = event.get("parameters")
            about = f" ({format_count(size)} parameters)" if number(size) is not None else ""
            words.append(printable(event["model"], 60) + about)
        if self._sites:
            words.append(plural(len(self._sites), "site"))
        self.title = " · ".join(word for word in words if word != MISSING) or "run"
        self.ended = None
        self._last_commit = number(event.get("time"))
        resumed = _whole(event.get("resumed_from"))
        if resumed is None:
            return f"start: {self.title}"
        self.done = resumed
        self._open_round(resumed + 1)
        return f"resume after round {resumed}: {self.title}"

    def _connected(self, event: Mapping[str, Any]) -> str | None:
        self._sites = _names(event.get("sites"))
        self.asked = len(self._sites)
        return f"  {plural(self.asked, 'site')}: {', '.join(self._sites)}" if self._sites else None

    def _open_round(self, round_: int | None) -> None:
        if round_ is not None and round_ > self.round:
            self.round = round_
            self.answered = {}
            self.pending = []
            self._round_began = time.monotonic()

    def _waiting(self, event: Mapping[str, Any]) -> None:
        self._open_round(_whole(event.get("round")))
        answered, pending = _names(event.get("answered")), _names(event.get("pending"))
        for name in answered:
            self.answered.setdefault(name, "accepted")
        self.pending = pending
        self.asked = max(len(answered) + len(pending), len(self.answered))

    def _site(self, event: Mapping[str, Any]) -> str | None:
        round_, name = _whole(event.get("round")), printable(event.get("site"))
        status = printable(event.get("status") or "accepted", 24)
        self._open_round(round_)
        if round_ is None or round_ == self.round:
            self.answered[name] = status
            self.pending = [other for other in self.pending if other != name]
            self.asked = max(self.asked, len(self.answered))
        if status == "accepted":
            return None
        line = f"{name} {status}" + (f" in round {round_}" if round_ is not None else "")
        if event.get("reason"):
            line += f": {printable(event['reason'], 200)}"
        self.faults.append(line)
        return f"  {line}"

    def _round(self, event: Mapping[str, Any]) -> str:
        round_ = _whole(event.get("round"))
        self._open_round(round_)
        now, taken = number(event.get("time")), number(event.get("seconds"))
        if now is not None and self._last_commit is not None and now > self._last_commit:
            taken = now - self._last_commit  # the whole way from commit to commit
        if taken is not None and taken > 0:
            self.recent.append(taken)
        self._last_commit = now
        self.done = round_ if round_ is not None else self.done + 1
        self.train_loss = number(event.get("train_loss"))
        self.rate = number(event.get("tokens_per_second"))
        self.up += number(event.get("bytes_up")) or 0.0
        self.down += number(event.get("bytes_down")) or 0.0
        accepted, asked = _whole(event.get("accepted")), _whole(event.get("asked"))
        asked = asked if asked is not None else self.asked or None
        parts = [
            f"round {self.done}{f'/{self.total}' if self.total else ''}",
            f"sites {_or_dash(accepted)}/{_or_dash(asked)}",
            f"train loss {format_loss(self.train_loss)}",
            f"{format_count(self.rate)} tokens/s",
            f"up {format_bytes(event.get('bytes_up'))}",
            f"down {format_bytes(event.get('bytes_down'))}",
            f"took {format_seconds(event.get('seconds'))}",
        ]
        left = self._left()
        if left is not None and self.total and self.done < self.total:
            parts.append(f"left {format_seconds(left)}")
        self._open_round(self.done + 1)
        return "  ".join(parts)

    def _eval(self, event: Mapping[str, Any]) -> str | None:
        if event.get("site") not in (None, "*"):
            return None
        loss = number(event.get("loss"))
        self.held_out = loss if loss is not None else self.held_out
        after = plural(_whole(event.get("round")) or 0, "round")
        return f"  held-out loss {format_loss(loss)} after {after}"

    def _server(self, event: Mapping[str, Any]) -> str:
        after = plural(_whole(event.get("round")) or 0, "round")
        return f"  loss on the server set {format_loss(number(event.get('loss')))} after {after}"

    def _comparison(self, event: Mapping[str, Any]) -> str | None:
        self.comparison = comparison_lines(event)
        return "\n".join(self.comparison) or None

    def _evaluation(self, event: Mapping[str, Any]) -> None:
        self.down += number(event.get("bytes_down")) or 0.0

    def _fault(self, event: Mapping[str, Any]) -> str:
        words = [printable(event.get("what") or "fault", 100)]
        if event.get("site"):
            words.insert(0, printable(event["site"]))
        if _whole(event.get("round")) is not None:
            words.append(f"in round {_whole(event['round'])}")
        line = " ".join(words)
        if event.get("detail"):
            line += f": {printable(event['detail'], 200)}"
        self.faults.append(line)
        return f"  {line}"

    def _end(self, event: Mapping[str, Any]) -> str:
        words = [printable(event.get("status") or "ended", 24)]
        rounds = _whole(event.get("rounds"))
        words.append(f"after {plural(rounds if rounds is not None else self.done, 'round')}")
        if number(event.get("seconds")) is not None:
            words.append(f"in {format_seconds(event['seconds'])}")
        line = " ".join(words)
        if event.get("reason"):
            line += f": {printable(event['reason'], 400)}"
        self.ended = line
        return line

    # -- showing -----------------------------------------------------------------

    def _left(self) -> float | None:
        """Seconds until the last planned round is done, judged by the newest rounds."""
        if not self.recent or not self.total:
            return None
        return max(0.0, (self.total - self.done) * sum(self.recent) / len(self.recent))

    def render(self) -> Group:
        """Draw the state as it is now; called a few times a second."""
        now = time.monotonic()
        parts: list[Any] = [Text(self.title, style="bold", no_wrap=True, overflow="ellipsis")]
        if self.ended is not None:
            style = "bold green" if self.ended.startswith("completed") else "bold red"
            parts.append(Text(self.ended, style=style))
        parts.append(self._bar(now))
        parts.append(self._figures())
        if self.ended is None:
            parts.append(self._waiting_line(now))
        parts += [Text(f"! {line}", style="yellow", overflow="ellipsis") for line in self.faults]
        parts += [Text(line, no_wrap=True, overflow="ellipsis") for line in self.comparison]
        return Group(*parts)

    def _bar(self, now: float) -> Table:
        total, left = self.total, self._left()
        row = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=total, completed=self.done, width=30, pulse=total is None)
        done = f"round {self.done}" + (f" of {total}" if total else "")
        times = f"{format_seconds(now - self._began)} passed"
        if left is not None and self.ended is None:
            spent = min(now - self._round_began, left)
            times += f", {format_seconds(left - spent)} left"
        row.add_row(bar, Text(done), Text(times, style="dim"))
        return row

    def _figures(self) -> Table:
        row = Table.grid(padding=(0, 2))
        row.add_row(
            Text.assemble(("held-out loss ", "dim"), format_loss(self.held_out)),
            Text.assemble(("train loss ", "dim"), format_loss(self.train_loss)),
            Text.assemble(("tokens/s ", "dim"), format_count(self.rate)),
            Text.assemble(
                ("up ", "dim"), format_bytes(self.up), ("  down ", "dim"), format_bytes(self.down)
            ),
        )
        return row

    def _waiting_line(self, now: float) -> Text:
        pending = self.pending or [s for s in self._sites if s not in self.answered]
        line = Text.assemble(
            (f"round {self.round} " if self.round else "", "dim"),
            f"{len(self.answered)} of {self.asked} sites answered",
            (f", {format_seconds(now - self._round_began)}", "dim"),
        )
        if pending and self.asked:
            more = len(pending) - _NAMES
            names = ", ".join(pending[:_NAMES]) + (f" and {more} more" if more > 0 else "")
            line.append(f"; waiting for {names}", style="dim")
        return line


def _whole(value: object) -> int | None:
    if isinstance(value, (list, tuple)):
        return len(value)
    found = number(value)
    return math.floor(found) if found is not None else None


def _names(value: object) -> list[str]:
    return [printable(item) for item in value] if isinstance(value, (list, tuple)) else []


def _or_dash(value: int | None) -> str:
    return MISSING if value is None else str(value)
