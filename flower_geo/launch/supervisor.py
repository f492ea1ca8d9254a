"""Submits a run, follows it, and submits it again when its server died.

The SuperLink has no way to resume a run whose ServerApp was killed.  The app
has: started again it goes on from its newest checkpoint.  So a crash is met
with a new submission, and a failure the app decided on (an ``end`` event that
says so, or an exception before any round) is not.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from flower_geo.errors import FlowerGeoError, RunFailed
from flower_geo.launch.flwr_cli import FlwrCli, RunStatus, SuperLinkUnreachable
from flower_geo.launch.watch import ServerWatch, Verdict
from flower_geo.observe import follow

__all__ = ["Outcome", "RunRequest", "Show", "supervise"]

_LONGEST_WAIT = 30.0
_STATUS_EVERY = 10.0


class Show(Protocol):
    """Where a run's events and the supervisor's remarks go: ``observe.Progress``."""

    def update(self, event: Mapping[str, Any]) -> None:
        """Show an event."""

    def note(self, line: str) -> None:
        """Show a remark."""


@dataclass(frozen=True)
class RunRequest:
    """What to run.

    Attributes:
        app: the app's folder.
        run_config: overrides for the app, kebab-case.
        federation_config: overrides for a simulated federation.
        folder: the run's folder when the coordinator is on this machine.
        max_restarts: submissions after a crash, counted from the newest
            committed round.
        private: the SuperLink is ours and goes when the run is over.
    """

    app: Path
    run_config: Mapping[str, Any]
    federation_config: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    max_restarts: int = 5
    private: bool = False


@dataclass
class Outcome:
    """How it ended.

    Attributes:
        status: ``completed``; ``failed``: the app gave up for a reason of its
            own; ``gave-up``: it crashed too often.
        reason: why, in one line, unless completed.
        run_id: Flower's id of the newest submission.
        restarts: submissions after the first one.
        end: the ``end`` event, empty when there was none.
        loss: held-out loss of the whole as last measured.
    """

    status: Literal["completed", "failed", "gave-up"]
    reason: str = ""
    run_id: str = ""
    restarts: int = 0
    end: dict[str, Any] = field(default_factory=dict)
    loss: float | None = None


@dataclass
class _Seen:
    """What the events of one submission said."""

    end: dict[str, Any] = field(default_factory=dict)
    loss: float | None = None
    rounds: int = 0

    def add(self, event: Mapping[str, Any]) -> None:
        what = event.get("event")
        if what == "end":
            self.end = dict(event)
        elif what == "round":
            self.rounds += 1
        elif what == "eval" and event.get("site") == "*":
            value = event.get("loss")
            if isinstance(value, (int, float)):
                self.loss = float(value)


def supervise(
    request: RunRequest,
    cli: FlwrCli,
    show: Show,
    *,
    renew: Callable[[], None] = lambda: None,
    alive: Callable[[], bool] = lambda: True,
) -> Outcome:
    """Run to the end.

    Args:
        request: what to run.
        cli: the connection to run it on.
        show: takes events and remarks.
        renew: called before each submission but the first.
        alive: whether a SuperLink of ours still lives.

    Raises:
        RunFailed: the first submission was refused.
    """
    outcome = Outcome("failed")
    crashes = 0
    while True:
        try:
            if crashes:
                renew()
            watch = ServerWatch(request.folder, cli, alive, private=request.private)
            outcome.run_id = watch.run_id = cli.submit(
                request.app, request.run_config, request.federation_config
            )
        except FlowerGeoError as error:
            if crashes == 0 and outcome.restarts == 0:
                raise
            reason, seen = str(error), _Seen()
        else:
            seen, verdict = _follow(request, cli, watch, show)
            outcome.end = seen.end
            outcome.loss = seen.loss if seen.loss is not None else outcome.loss
            decided = _decided(seen, verdict)
            if decided is not None:
                outcome.status, outcome.reason = decided
                return outcome
            reason = verdict.reason
            _end_old_run(cli, outcome.run_id, private=request.private)
        crashes = 1 if seen.rounds else crashes + 1
        if crashes > request.max_restarts:
            outcome.status = "gave-up"
            outcome.reason = (
                f"{reason}; submitted {crashes} times without a committed round in between. "
                "Look at the log, then run the same command again to go on"
            )
            return outcome
        wait = min(2.0 ** (crashes - 1), _LONGEST_WAIT)
        outcome.restarts += 1
        show.note(
            f"{reason}; submitting again in {wait:.0f} s "
            f"(restart {crashes} of {request.max_restarts})"
        )
        time.sleep(wait)


def _decided(seen: _Seen, verdict: Verdict) -> tuple[Literal["completed", "failed"], str] | None:
    """Status and reason when the run must not be submitted again."""
    if seen.end.get("status") == "completed":
        if verdict.status is not None and verdict.status.status == "finished:failed":
            return "failed", f"Flower reports a failure after the end: {verdict.reason}"
        return "completed", ""
    if seen.end:
        reason = str(seen.end.get("reason") or "") or f"the run {seen.end.get('status')}"
        return "failed", reason
    if verdict.status is None:
        return None
    if verdict.status.completed:
        return "completed", ""
    if verdict.status.status == "finished:stopped":
        return "failed", "the run was stopped (flwr stop); run the same command again to go on"
    if "exception" in verdict.status.details and not seen.rounds:
        return "failed", _exception_text(verdict.status)
    return None


def _exception_text(status: RunStatus) -> str:
    """The exception's own words out of Flower's ``... failed with exception: ...``."""
    _, found, text = status.details.partition("exception: ")
    return " ".join((text if found else status.details).split())


def _end_old_run(cli: FlwrCli, run_id: str, *, private: bool) -> None:
    """Tell the SuperLink that a crashed run is over; it would wait a minute to notice."""
    if private:
        return
    try:
        cli.stop(run_id)
    except RunFailed:
        pass  # it has noticed, or it is down itself


def _follow(
    request: RunRequest, cli: FlwrCli, watch: ServerWatch, show: Show
) -> tuple[_Seen, Verdict]:
    seen = _Seen()
    if request.folder is not None:
        metrics = request.folder / "metrics.jsonl"
        with watch:
            for event in follow(metrics, watch.done, offset=watch.offset):
                seen.add(event)
                if event.get("event") == "end":
                    watch.end_seen()
                show.update(event)
        verdict = watch.verdict
        if not verdict.unseen:
            return seen, verdict
        show.note(f"no run folder {request.folder} here; showing the coordinator's log instead")
    return seen, _follow_log(cli, watch.run_id, show)


def _follow_log(cli: FlwrCli, run_id: str, show: Show) -> Verdict:
    """Show the coordinator's log until the SuperLink says that the run is over."""
    log = subprocess.Popen(
        cli.command("log", run_id, cli.connection, "--stream"),
        env=cli.environment(), stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    try:
        assert log.stdout is not None
        for line in log.stdout:  # ends with the run, or with the connection
            show.note(line.rstrip())
        while True:
            try:
                status = cli.status(run_id)
            except SuperLinkUnreachable as error:
                return Verdict(str(error))
            except RunFailed as error:
                return Verdict(str(error))
            if status.finished:
                return Verdict(status.details or status.status, status)
            time.sleep(_STATUS_EVERY)
    finally:
        log.kill()
        log.wait()
        if log.stdout is not None:
            log.stdout.close()
