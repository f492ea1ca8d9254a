"""Submits a run, follows it, and submits it again when its server died.

The SuperLink has no way to resume a run whose ServerApp was killed.  The app
has: started again it goes on from its newest checkpoint.  So a crash is met
with a new submission, and a failure the app decided on (an ``end`` event that
says so, or an exception before any round) is not.  A SuperLink that is away is
waited for; whether it comes back with or without memory of the run makes no
difference, since the run's own is in its folder.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from flower_geo.errors import FlowerGeoError, RunFailed, StateError
from flower_geo.launch.flwr_cli import FlwrCli, RunStatus, SuperLinkUnreachable
from flower_geo.launch.processes import ProcessRef
from flower_geo.launch.record import Course, Status
from flower_geo.launch.servers import end_server
from flower_geo.launch.watch import ServerWatch, Verdict
from flower_geo.observe import follow

__all__ = ["Outcome", "RunRequest", "Show", "supervise"]

_LONGEST_WAIT = 30.0
_LONGEST_ABSENCE = 3600.0  # seconds a SuperLink may be away
_STATUS_EVERY = 10.0
_IN_USE = "is in use by process"  # of a lock on the run folder


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
        max_restarts: submissions after failures of one and the same round.
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
            own; ``gave-up``: one round failed too often, or the SuperLink
            stayed away.
        reason: why, in one line, unless completed.
        run_id: Flower's id of the newest submission.
        restarts: submissions after the first one.
        end: the ``end`` event, empty when there was none.
        loss: held-out loss of the whole as last measured.
    """

    status: Status
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
    committed: int = 0

    def add(self, event: Mapping[str, Any]) -> None:
        what = event.get("event")
        if what == "end":
            self.end = dict(event)
        elif what == "round" and isinstance(event.get("round"), int):
            self.committed = max(self.committed, event["round"])
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
    course: Course | None = None,
    store: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run to the end.

    Args:
        request: what to run.
        cli: the connection to run it on.
        show: takes events and remarks.
        renew: called before each submission but the first.
        alive: whether a SuperLink of ours still lives.
        course: how far another supervisor brought it; changed in place.
        store: called whenever ``course`` has changed.

    Raises:
        RunFailed: the first submission was refused.
    """
    return _Supervisor(request, cli, show, renew, alive, course or Course(), store).run()


@dataclass
class _Supervisor:
    """One call of :func:`supervise`; what must outlive it is in ``course``."""

    request: RunRequest
    cli: FlwrCli
    show: Show
    renew: Callable[[], None]
    alive: Callable[[], bool]
    course: Course
    store: Callable[[], None]
    first: bool = True
    unstopped: str = ""

    def run(self) -> Outcome:
        course, outcome = self.course, Outcome("failed")
        taken_up = course.restarts > 0 or bool(course.run_id)
        while True:
            seen, reason = _Seen(), ""
            try:
                watch = self._rejoin() if self.first and course.run_id else self._submit(taken_up)
            except SuperLinkUnreachable as error:
                if not taken_up:
                    raise
                return self._closed(outcome, "gave-up", str(error))
            except FlowerGeoError as error:
                if not taken_up:
                    raise
                reason = str(error)
            else:
                taken_up = True
                seen, verdict = _follow(self.request, self.cli, watch, self.show)
                outcome.run_id, outcome.end = course.run_id, seen.end
                outcome.loss = seen.loss if seen.loss is not None else outcome.loss
                resumed = max(seen.committed, course.committed) > 0
                decided = _decided(seen, verdict, resumed=resumed, again=course.restarts > 0)
                if decided is not None:
                    return self._closed(outcome, *decided)
                reason = verdict.reason
                self._end_old_run()
                # A private SuperLink's processes are ended by `renew`; and a server
                # that was never ours, which locked the folder first, is left alone.
                if not self.request.private and (course.server or course.restarts):
                    end_server(self.request.folder, course.server)
            self.first = False
            progress = seen.committed > course.committed
            course.committed = max(seen.committed, course.committed)
            course.failures = 1 if progress else course.failures + 1
            course.run_id, course.server = "", None
            if course.failures > self.request.max_restarts:
                return self._closed(
                    outcome, "gave-up",
                    f"{reason}; round {course.committed + 1} failed {course.failures} times. "
                    "Look at the log, then run the same command again to go on",
                )  # fmt: skip
            wait = min(2.0 ** (course.failures - 1), _LONGEST_WAIT)
            course.restarts += 1
            self._keep()
            self.show.note(
                f"{reason}; submitting again in {wait:.0f} s "
                f"(restart {course.failures} of {self.request.max_restarts})"
            )
            time.sleep(wait)

    def _watch(self) -> ServerWatch:
        return ServerWatch(
            self.request.folder, self.cli, self.alive, private=self.request.private,
            found=self._server_found,
        )  # fmt: skip

    def _server_found(self, server: ProcessRef) -> None:
        self.course.server = server
        self._keep()

    def _rejoin(self) -> ServerWatch:
        """Go on watching what another supervisor submitted."""
        watch, course = self._watch(), self.course
        watch.run_id = course.run_id
        watch.resume(course.offset, course.stamp, course.server)
        return watch

    def _submit(self, again: bool) -> ServerWatch:
        """Submit, waiting for a SuperLink that is away unless it is for the first time."""
        course, began, tries = self.course, time.monotonic(), 0
        while True:
            try:
                if again:
                    self.renew()
                    self._end_old_run()
                watch = self._watch()
                course.offset, course.stamp = watch.offset, watch.stamp
                self._keep()
                course.run_id = watch.run_id = self.cli.submit(
                    self.request.app, self.request.run_config, self.request.federation_config
                )
                self._keep()
            except SuperLinkUnreachable as error:
                away = time.monotonic() - began
                if not again or away > _LONGEST_ABSENCE:
                    raise
                if tries == 0:
                    self.show.note(f"{error}; waiting for it")
                tries += 1
                # Not in step with other supervisors, all of which lost the same SuperLink.
                time.sleep(min(2.0 ** (tries - 1), _LONGEST_WAIT) * random.uniform(0.7, 1.0))
                continue
            if tries:
                self.show.note(f"the SuperLink is back after {time.monotonic() - began:.0f} s")
            return watch

    def _end_old_run(self) -> None:
        """Tell the SuperLink that a crashed run is over; it would wait a minute to notice."""
        old = self.unstopped or self.course.run_id
        if self.request.private or not old:
            return
        self.unstopped = ""
        try:
            self.cli.stop(old)
        except SuperLinkUnreachable:
            self.unstopped = old  # it may come back with a memory
        except RunFailed:
            pass  # it has noticed, or it does not know the run any more

    def _closed(self, outcome: Outcome, status: Status, reason: str) -> Outcome:
        outcome.status = self.course.status = status
        outcome.reason = self.course.reason = reason
        outcome.restarts = self.course.restarts
        self._keep()
        return outcome

    def _keep(self) -> None:
        with contextlib.suppress(StateError):  # a full disk must not end a run that lives
            self.store()


def _decided(
    seen: _Seen, verdict: Verdict, *, resumed: bool, again: bool
) -> tuple[Status, str] | None:
    """Status and reason when the run must not be submitted again.

    Args:
        seen: what the events said.
        verdict: why following ended.
        resumed: a round was committed, in this life of the server or before: the
            settings are good, so that an exception is an accident.
        again: this was not the first submission.
    """
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
    if "exception" in verdict.status.details and not resumed:
        text = _exception_text(verdict.status)
        # An earlier life that is not quite over; it is ended before the next try.
        return None if again and _IN_USE in text else ("failed", text)
    return None


def _exception_text(status: RunStatus) -> str:
    """The exception's own words out of Flower's ``... failed with exception: ...``."""
    _, found, text = status.details.partition("exception: ")
    return " ".join((text if found else status.details).split())


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
