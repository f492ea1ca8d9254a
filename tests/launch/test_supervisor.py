"""Following, deciding and submitting again, against a SuperLink that only pretends."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flower_geo.errors import RunFailed
from flower_geo.launch import servers, supervisor, watch
from flower_geo.launch.flwr_cli import RunStatus, SuperLinkUnreachable
from flower_geo.launch.processes import ProcessRef
from flower_geo.launch.record import Course
from flower_geo.launch.supervisor import Outcome, RunRequest, supervise
from tests.launch.rehearsal import FakeServer, RehearsedCli, Shown

Script = Callable[[RehearsedCli], None]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_LOOK", 0.02)
    monkeypatch.setattr(watch, "_ASK_EARLY", 0.1)
    monkeypatch.setattr(watch, "_ASK_CLOSED", 0.05)
    monkeypatch.setattr(supervisor, "_LONGEST_WAIT", 0.05)


def _serves(
    rounds: int, then: Callable[[RehearsedCli, FakeServer], None], first: int = 1
) -> Script:
    """A ServerApp that commits some rounds and then does something else."""

    def script(cli: RehearsedCli) -> None:
        server = FakeServer(cli.folder)
        server.emit("start", rounds=3)
        for number in range(first, first + rounds):
            server.emit("round", round=number)
            server.emit("eval", round=number, site="*", loss=5.0 - number)
        time.sleep(0.15)
        then(cli, server)

    return script


def _completes(cli: RehearsedCli, server: FakeServer) -> None:
    server.end("completed", sample="text", model_dir="m")
    cli.now = RunStatus("finished:completed", "")


def _gives_up(cli: RehearsedCli, server: FakeServer) -> None:
    server.end("failed", "too few sites; bring some back")
    cli.now = RunStatus("finished:failed", "ServerApp failed with exception: too few")


def _dies(cli: RehearsedCli, server: FakeServer) -> None:
    server.die()


def _raises(cli: RehearsedCli) -> None:
    cli.now = RunStatus("finished:failed", "ServerApp failed with exception: no such\n model")


def _run(
    folder: Path, *scripts: Script | Exception, restarts: int = 3, private: bool = False
) -> tuple[Outcome, RehearsedCli, Shown]:
    cli, shown = RehearsedCli(folder, *scripts), Shown()  # type: ignore[arg-type]
    request = RunRequest(folder, {"a": 1}, {}, folder, max_restarts=restarts, private=private)
    outcome = supervise(request, cli, shown)
    cli.join()
    return outcome, cli, shown


@pytest.mark.parametrize("private", [True, False])
def test_a_run_is_followed_to_its_end(tmp_path: Path, private: bool) -> None:
    outcome, cli, shown = _run(tmp_path, _serves(2, _completes), private=private)
    assert outcome.status == "completed"
    assert outcome.end["sample"] == "text"
    assert outcome.loss == 3.0
    assert outcome.restarts == 0 and cli.stopped == []
    assert [event["event"] for event in shown.events] == [
        "start", "round", "eval", "round", "eval", "end",
    ]  # fmt: skip


def test_a_killed_server_is_noticed_by_its_pid_and_the_run_submitted_again(tmp_path: Path) -> None:
    outcome, cli, shown = _run(tmp_path, _serves(1, _dies), _serves(2, _completes))
    assert outcome.status == "completed" and outcome.restarts == 1
    assert len(cli.submitted) == 2 and cli.stopped == ["1"]
    (note,) = shown.notes
    assert "died" in note and "restart 1 of 3" in note
    assert [event["event"] for event in shown.events].count("start") == 2


def test_a_decided_failure_is_not_tried_again(tmp_path: Path) -> None:
    outcome, cli, _ = _run(tmp_path, _serves(1, _gives_up))
    assert outcome.status == "failed"
    assert outcome.reason == "too few sites; bring some back"
    assert len(cli.submitted) == 1


def test_an_exception_before_any_round_is_a_decided_failure(tmp_path: Path) -> None:
    outcome, cli, _ = _run(tmp_path, _raises)
    assert outcome.status == "failed" and outcome.reason == "no such model"
    assert len(cli.submitted) == 1


def test_an_exception_after_a_round_is_tried_again(tmp_path: Path) -> None:
    def breaks(cli: RehearsedCli, server: FakeServer) -> None:
        (server.folder / "server.pid").unlink()
        server.die()
        _raises(cli)

    outcome, cli, _ = _run(tmp_path, _serves(1, breaks), _serves(0, _completes))
    assert outcome.status == "completed" and len(cli.submitted) == 2


def test_a_run_that_was_stopped_is_not_submitted_again(tmp_path: Path) -> None:
    def stopped(cli: RehearsedCli) -> None:
        cli.now = RunStatus("finished:stopped", "Stopped by user.")

    outcome, cli, _ = _run(tmp_path, stopped)
    assert outcome.status == "failed" and "flwr stop" in outcome.reason
    assert len(cli.submitted) == 1


def test_crashes_without_progress_come_to_an_end(tmp_path: Path) -> None:
    outcome, cli, shown = _run(tmp_path, *[_serves(0, _dies)] * 3, restarts=2)
    assert outcome.status == "gave-up"
    assert "died" in outcome.reason and "round 1 failed 3 times" in outcome.reason
    assert len(cli.submitted) == 3 and len(shown.notes) == 2


def test_a_committed_round_starts_the_count_again(tmp_path: Path) -> None:
    scripts = [
        _serves(0, _dies), _serves(1, _dies), _serves(1, _dies, first=2),
        _serves(1, _completes, first=3),
    ]  # fmt: skip
    outcome, cli, _ = _run(tmp_path, *scripts, restarts=1)
    assert outcome.status == "completed" and outcome.restarts == 3
    assert len(cli.submitted) == 4


def test_a_round_that_is_announced_and_lost_each_time_comes_to_an_end(tmp_path: Path) -> None:
    """Killed while the checkpoint is written, the server does the same round again."""
    outcome, cli, _ = _run(tmp_path, *[_serves(1, _dies)] * 3, restarts=2)
    assert outcome.status == "gave-up" and "round 2 failed 3 times" in outcome.reason
    assert len(cli.submitted) == 3


def test_no_restarts_means_none(tmp_path: Path) -> None:
    outcome, cli, _ = _run(tmp_path, _serves(1, _dies), restarts=0)
    assert outcome.status == "gave-up" and len(cli.submitted) == 1


def test_a_first_submission_that_is_refused_raises(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="no such app"):
        _run(tmp_path, RunFailed("no such app"))


def test_a_superlink_away_after_a_crash_is_tried_again(tmp_path: Path) -> None:
    outcome, cli, shown = _run(
        tmp_path, _serves(1, _dies), SuperLinkUnreachable("away"), _serves(0, _completes)
    )
    assert outcome.status == "completed" and len(cli.submitted) == 3
    assert shown.notes[1:] == ["away; waiting for it", "the SuperLink is back after 0 s"]
    assert outcome.restarts == 1


def test_a_superlink_away_for_long_costs_no_restarts(tmp_path: Path) -> None:
    away = [SuperLinkUnreachable("away")] * 9
    outcome, cli, shown = _run(tmp_path, _serves(1, _dies), *away, _serves(0, _completes))
    assert outcome.status == "completed" and outcome.restarts == 1
    assert [note for note in shown.notes if "waiting" in note] == ["away; waiting for it"]
    assert cli.stopped == ["1"]


def test_a_superlink_that_stays_away_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_ABSENCE", 0.1)
    cli = RehearsedCli(tmp_path, *[_serves(1, _dies)])
    lost = SuperLinkUnreachable("away")
    cli._scripts += [lost] * 50  # type: ignore[list-item]
    outcome = supervise(RunRequest(tmp_path, {}, folder=tmp_path), cli, Shown())
    assert outcome.status == "gave-up" and outcome.reason == "away"


def test_a_superlink_that_could_not_be_told_is_told_when_it_is_back(tmp_path: Path) -> None:
    told: list[str] = []

    class Forgetful(RehearsedCli):
        def stop(self, run_id: str) -> None:
            told.append(run_id)
            if len(told) == 1:
                raise SuperLinkUnreachable("away")
            raise RunFailed("no such run")

    cli = Forgetful(tmp_path, _serves(1, _dies), _serves(0, _completes))
    outcome = supervise(RunRequest(tmp_path, {}, folder=tmp_path), cli, Shown())
    assert outcome.status == "completed" and told == ["1", "1"]


def test_a_server_whose_run_was_forgotten_is_ended_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A SuperLink that came back without memory knows no such run; the server still lives."""
    monkeypatch.setattr(watch, "_ASK_LATE", 0.1)
    monkeypatch.setattr(watch, "_ASK_AGAIN", 0.05)
    monkeypatch.setattr(servers, "_is_server", lambda server: server.alive())
    servers_seen = []

    def forgotten(cli: RehearsedCli, server: FakeServer) -> None:
        servers_seen.append(server)
        cli.now = RunFailed("the SuperLink knows no run 1")

    outcome, _, shown = _run(tmp_path, _serves(1, forgotten), _serves(0, _completes))
    assert outcome.status == "completed" and "knows no run 1" in shown.notes[0]
    (server,) = servers_seen
    assert server.process.wait(5) == -signal.SIGTERM
    server.log.close()


def test_a_lock_that_an_earlier_life_still_held_is_tried_again(tmp_path: Path) -> None:
    def locked(cli: RehearsedCli) -> None:
        cli.now = RunStatus(
            "finished:failed", "failed with exception: run 'x' is in use by process 7 (x/lock)"
        )

    outcome, cli, _ = _run(tmp_path, _serves(0, _dies), locked, _serves(0, _completes))
    assert outcome.status == "completed" and len(cli.submitted) == 3
    outcome, cli, _ = _run(tmp_path, locked)  # somebody else's, at the first try
    assert outcome.status == "failed" and "is in use" in outcome.reason


def test_an_exception_after_a_restart_is_an_accident(tmp_path: Path) -> None:
    outcome, cli, _ = _run(tmp_path, _serves(1, _dies), _raises, _serves(0, _completes))
    assert outcome.status == "completed" and len(cli.submitted) == 3


def test_a_run_that_lives_is_taken_up_where_its_supervisor_left(tmp_path: Path) -> None:
    """Its events since the submission are shown again; nothing is submitted."""
    earlier = FakeServer(tmp_path)
    earlier.emit("round", round=1)
    offset = (tmp_path / "metrics.jsonl").stat().st_size
    stamp = watch._stamp(tmp_path / "server.pid")
    earlier.die()
    server = FakeServer(tmp_path)
    server.emit("round", round=2)
    cli, shown, stored = RehearsedCli(tmp_path), Shown(), []
    cli.submitted.append({})
    course = Course(run_id="1", restarts=2, committed=1, offset=offset, stamp=stamp)
    timer = threading.Timer(0.5, lambda: _completes(cli, server))
    timer.start()
    outcome = supervise(
        RunRequest(tmp_path, {}, folder=tmp_path), cli, shown, course=course,
        store=lambda: stored.append(course.server),
    )  # fmt: skip
    timer.join()
    assert outcome.status == course.status == "completed" and outcome.restarts == 2
    assert len(cli.submitted) == 1
    assert [event["event"] for event in shown.events] == ["round", "end"]
    assert stored[0] is not None and stored[0].pid == server.process.pid


def test_a_run_that_died_unsupervised_is_submitted_again(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    server = ProcessRef.of(dead.pid)
    dead.wait()
    (tmp_path / "server.pid").write_text(f"{dead.pid}\n")
    cli = RehearsedCli(tmp_path, _serves(0, _completes))
    cli.submitted.append({})
    course = Course(run_id="1", committed=1, server=server)
    shown = Shown()
    outcome = supervise(RunRequest(tmp_path, {}, folder=tmp_path), cli, shown, course=course)
    cli.join()
    assert outcome.status == "completed" and outcome.restarts == 1
    assert f"(pid {server.pid}) died" in shown.notes[0]


def test_a_superlink_that_is_away_does_not_end_a_run_that_lives(tmp_path: Path) -> None:
    def away(cli: RehearsedCli, server: FakeServer) -> None:
        cli.now = SuperLinkUnreachable("away")
        time.sleep(0.4)
        _completes(cli, server)

    outcome, cli, _ = _run(tmp_path, _serves(1, away))
    assert outcome.status == "completed" and len(cli.submitted) == 1


def test_a_pid_of_another_container_means_nothing(tmp_path: Path) -> None:
    def elsewhere(cli: RehearsedCli) -> None:
        server = FakeServer(cli.folder)
        server.foreign()
        server.emit("start", rounds=1)
        time.sleep(0.5)
        _completes(cli, server)

    outcome, cli, _ = _run(tmp_path, elsewhere)
    assert outcome.status == "completed" and len(cli.submitted) == 1


def test_what_an_earlier_run_left_is_not_taken_for_this_one(tmp_path: Path) -> None:
    old = FakeServer(tmp_path)
    old.emit("round", round=1)
    old.emit("end", status="failed", reason="long ago")
    old.die()  # its pid file stays

    outcome, _, shown = _run(tmp_path, _serves(1, _completes))
    assert outcome.status == "completed"
    assert [event["event"] for event in shown.events] == ["start", "round", "eval", "end"]


def test_a_superlink_of_ours_that_died_is_started_again(tmp_path: Path) -> None:
    alive = [True]

    def lost(cli: RehearsedCli, server: FakeServer) -> None:
        alive[0] = False
        server.die()

    def renew() -> None:
        alive[0] = True

    cli, shown = RehearsedCli(tmp_path, _serves(1, lost), _serves(1, _completes)), Shown()
    request = RunRequest(tmp_path, {}, {}, tmp_path, private=True)
    outcome = supervise(request, cli, shown, renew=renew, alive=lambda: alive[0])
    cli.join()
    assert outcome.status == "completed" and outcome.restarts == 1
    assert cli.stopped == []


def test_without_a_folder_here_the_coordinators_log_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def done(cli: RehearsedCli) -> None:
        cli.now = RunStatus("finished:completed", "")

    cli, shown = RehearsedCli(tmp_path, done), Shown()
    monkeypatch.setattr(cli, "command", lambda *words: ["/bin/echo", *words])
    outcome = supervise(RunRequest(tmp_path, {}), cli, shown)
    cli.join()
    assert outcome.status == "completed"
    assert shown.notes == ["log 1 rehearsal --stream"]


def test_a_folder_that_does_not_appear_here_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_UNSEEN_AFTER", 0.2)

    def unseen(cli: RehearsedCli) -> None:
        time.sleep(0.8)
        cli.now = RunStatus("finished:completed", "")

    monkeypatch.setattr(supervisor, "_STATUS_EVERY", 0.1)
    cli, shown = RehearsedCli(tmp_path, unseen), Shown()
    monkeypatch.setattr(cli, "command", lambda *words: ["/bin/echo", *words])
    outcome = supervise(RunRequest(tmp_path, {}, folder=tmp_path / "none"), cli, shown)
    cli.join()
    assert outcome.status == "completed"
    assert "no run folder" in shown.notes[0]
