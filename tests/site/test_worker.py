"""The worker process: real ones, killed, stopped, asked twice, told to end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from flower_geo.durable import read_sealed
from flower_geo.errors import CheckpointCorrupt, ConfigError, DataError, StateLocked, WorkerFailed
from flower_geo.messages import Reply, Request
from flower_geo.site import client, place, work
from flower_geo.site.client import ask_worker, uses_worker
from flower_geo.site.place import Place
from flower_geo.site.worker import WorkerLock, _idle_after
from tests.site.requests import Desk, blobs, folder_of, state_of

ROOT = Path(__file__).resolve().parents[2]
#: A round of some seconds, with a snapshot every second or so.
LONG: dict[str, Any] = {"inner-steps": 60, "batch-size": 16, "snapshot-steps": 2}


@pytest.fixture(scope="module")
def long_desk() -> Desk:
    return Desk(**LONG)


@pytest.fixture(scope="module")
def undisturbed(
    long_desk: Desk, texts: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Reply:
    """The long round as one process trains it in one go, without snapshots."""
    state = str(tmp_path_factory.mktemp("undisturbed"))
    node = {"site": "north", "data": str(texts[0]), "state-dir": state, "snapshot-steps": 0}
    return work.train_request(long_desk.request(1, evaluate=True), node)


@pytest.fixture
def ended(north: dict[str, Any]) -> Iterator[Callable[[], None]]:
    """Ends the worker; none may be left after the test, nor anything of it."""

    def end() -> None:
        process = place_of(north).process()
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.send_signal(signal.SIGTERM)
        wait_until(lambda: place_of(north).owner() is None, 20)
        for child in list(client._children):
            child.wait(10)

    yield end
    end()


def place_of(node: dict[str, Any]) -> Place:
    return Place(folder_of(node))


def wait_until(true: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


def asked(node: dict[str, Any], request: Request, name: str = "train_request") -> Future[Reply]:
    """A request on its way, as from a ClientApp of its own."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(ask_worker, name, request, node)
    pool.shutdown(wait=False)
    return future


def worker_of(node: dict[str, Any]) -> psutil.Process:
    found: list[psutil.Process] = []

    def living() -> bool:
        process = place_of(node).process()
        found[:] = [] if process is None else [process]
        return bool(found)

    wait_until(living)
    return found[0]


def stored_steps(node: dict[str, Any]) -> int:
    """Steps the snapshot holds; 0 without one."""
    try:
        return int(read_sealed(folder_of(node) / "snapshot" / "snapshot.json")["so_far"]["steps"])
    except CheckpointCorrupt:
        return 0


def same(one: Reply, other: Reply) -> None:
    """Equal to the bit but for what clocks say."""

    def numbers(reply: Reply) -> dict[str, float]:
        return {k: v for k, v in reply.metrics.items() if not k.startswith("seconds")}

    assert numbers(one) == numbers(other)
    assert blobs(one) == blobs(other)
    assert replace(one, arrays=None, metrics={}) == replace(other, arrays=None, metrics={})


def test_both_modes_give_the_same_bits_and_the_worker_stays(
    desk: Desk, north: dict[str, Any], tmp_path: Path, ended: Callable[[], None],
    newer: dict[str, Any],
) -> None:  # fmt: skip
    inside = {**north, "state-dir": str(tmp_path / "inside")}
    pids = set()
    requests = [
        ("greet_request", desk.request(0)),
        ("train_request", desk.request(1, evaluate=True)),
        ("train_request", desk.request(2, accepted=1)),
        ("train_request", replace(desk.snapshot(newer, 1, round=3), accepted=2)),
        ("evaluate_request", replace(desk.request(3), version=7, base_hash="elsewhere")),
    ]
    for name, request in requests:
        theirs = ask_worker(name, request, north)
        pids.add(worker_of(north).pid)
        mine = getattr(work, name)(request, inside)
        if mine.arrays is None:
            numbers = {k: v for k, v in mine.metrics.items() if not k.startswith("seconds")}
            assert theirs.metrics == numbers
            assert replace(theirs, metrics={}) == replace(mine, metrics={})
        else:
            same(theirs, mine)
    assert len(pids) == 1
    at = place_of(north)
    for private in (at.log, at.lock, at.home / "socket", at.home, at.folder):
        assert private.stat().st_mode & 0o077 == 0
    ended()
    assert not at.home.exists()
    assert not [p for p in at.folder.iterdir() if p.name.startswith((".", "snapshot"))]


def test_a_worker_killed_in_a_round_loses_no_bit(
    long_desk: Desk, north: dict[str, Any], undisturbed: Reply, ended: Callable[[], None]
) -> None:
    future = asked(north, long_desk.request(1, evaluate=True))
    wait_until(lambda: stored_steps(north))
    worker_of(north).kill()
    same(future.result(60), undisturbed)
    assert place_of(north).log.read_text().count("goes on in round 1 after step") == 1
    assert not (folder_of(north) / "snapshot").exists()


def test_a_worker_told_to_end_snapshots_and_the_round_goes_on(
    long_desk: Desk, north: dict[str, Any], undisturbed: Reply, ended: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(client, "_LEAVE_SECONDS", 0.1)
    # None of its own accord: the snapshot found is that of the notice.
    future = asked({**north, "snapshot-steps": 0}, long_desk.request(1, evaluate=True))
    log = place_of(north).log
    wait_until(lambda: log.exists() and " training\n" in log.read_text())
    time.sleep(0.5)  # some steps
    told = worker_of(north)
    told.send_signal(signal.SIGUSR1)
    wait_until(lambda: place_of(north).owner() != told.pid, 10)
    assert stored_steps(north) > 0
    same(future.result(60), undisturbed)


def test_asked_twice_at_once_it_trains_once_and_errors_come_back_as_they_were(
    desk: Desk, north: dict[str, Any], ended: Callable[[], None]
) -> None:
    first = asked(north, desk.request(1))
    second = asked(north, replace(desk.request(1), attempt=2))
    same(first.result(60), second.result(60))
    assert first.result().metrics == second.result().metrics  # the clocks' numbers, too
    # Of two that were started, perhaps, one found the place taken.
    assert place_of(north).log.read_text().count("train_request of round 1: done") == 2
    with pytest.raises(DataError, match="/not/here"):
        ask_worker("greet_request", desk.request(0), {**north, "data": "/not/here"})
    with pytest.raises(ConfigError, match="toaster"):
        ask_worker("greet_request", desk.request(0), {**north, "device": "toaster"})
    with pytest.raises(WorkerFailed, match="cannot be handed"):
        odd = replace(desk.request(0), config={**desk.request(0).config, "data": b"x"})
        ask_worker("greet_request", odd, north)
    with state_of(north), pytest.raises(StateLocked, match="is in use by process"):
        ask_worker("greet_request", desk.request(0), north)


@pytest.mark.slow
def test_a_client_app_that_is_killed_costs_no_step(
    long_desk: Desk, north: dict[str, Any], undisturbed: Reply, ended: Callable[[], None]
) -> None:
    log = place_of(north).log
    asking = subprocess.Popen(
        [sys.executable, "-c", THIN, given(long_desk.request(1, evaluate=True), north)],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: log.exists() and " training\n" in log.read_text())
    asking.kill()
    asking.wait()
    same(ask_worker("train_request", long_desk.request(1, evaluate=True), north), undisturbed)
    assert log.read_text().count(" training\n") == 1


def test_workers_that_die_again_and_again_end_the_request(
    desk: Desk, north: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ended: Callable[[], None]
) -> None:
    monkeypatch.setattr(client, "MODULE", "flower_geo.site.not_there")
    with pytest.raises(WorkerFailed, match=r"lost 3 times in a row .* exit code 1; see") as caught:
        ask_worker("greet_request", desk.request(0), north)
    assert "\n" not in str(caught.value)


HANGING = """
import fcntl, os, socket, sys, time
home = os.path.join(sys.argv[1], "worker")
lock = os.open(os.path.join(home, "lock"), os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(lock, fcntl.LOCK_EX)
os.truncate(lock, 0)
os.write(lock, str(os.getpid()).encode())
os.chdir(home)
if os.path.lexists("socket"):
    os.unlink("socket")
listener = socket.socket(socket.AF_UNIX)
listener.bind("socket")
listener.listen()
lines = [listener.accept()]
time.sleep(100)
"""


def test_workers_that_hang_are_killed_and_said_to(
    desk: Desk, north: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    ended: Callable[[], None],
) -> None:  # fmt: skip
    (tmp_path / "hanging.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for module in (client, place):
        monkeypatch.setattr(module, "MODULE", "hanging")
    began = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"said nothing for 1 s \(worker-stall=1\)"):
        ask_worker("greet_request", desk.request(0), {**north, "worker-stall": 1})
    assert 3 <= time.monotonic() - began < 15
    assert place_of(north).owner() is None


def refused(node: dict[str, Any], request: Request) -> int:
    """Ask what is refused at once; pid of the worker that said so."""
    with pytest.raises(ConfigError, match="node-config inner-steps=0"):
        ask_worker("greet_request", request, {**node, "inner-steps": 0})
    process = place_of(node).process()
    return process.pid if process is not None else 0


@pytest.mark.slow
def test_the_life_of_workers(
    desk: Desk, north: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ended: Callable[[], None]
) -> None:
    monkeypatch.setattr(client, "_LEAVE_SECONDS", 0.1)
    north["state-dir"] += "/deep" * 40  # too long for the path of a socket
    at, hello = place_of(north), desk.request(0)
    # One that is stopped is noticed and replaced, ...
    first = refused(north, hello)
    os.kill(first, signal.SIGSTOP)
    began = time.monotonic()
    second = refused(north, hello)
    assert second != first and 2 <= time.monotonic() - began < 10
    # ... what a killed one leaves does not keep the next from starting, ...
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: at.owner() is None, 10)
    assert (at.home / "socket").exists() and at.process() is None
    third = refused(north, hello)
    # ... one that knows another environment makes room, ...
    monkeypatch.setenv("HF_SOMETHING", "new")
    fourth = refused({**north, "worker-idle": 1}, hello)
    assert len({second, third, fourth}) == 3
    # ... and the last ends by itself and leaves nothing.
    wait_until(lambda: not at.home.exists(), 10)
    assert at.owner() is None
    # One whose folder was removed ends, too.
    fifth = psutil.Process(refused(north, hello))
    shutil.rmtree(at.folder)
    with contextlib.suppress(psutil.NoSuchProcess):
        fifth.wait(10)


def test_it_waits_less_long_when_the_run_is_over(desk: Desk) -> None:
    assert _idle_after(desk.request(4), 900.0) == 900.0
    assert _idle_after(desk.request(5), 900.0) == 60.0
    assert _idle_after(desk.request(5), 5.0) == 5.0


def test_a_lock_whose_file_was_replaced_leaves_the_other_alone(tmp_path: Path) -> None:
    at = Place(tmp_path)
    at.make()
    old, new = WorkerLock(at.lock), WorkerLock(at.lock)
    old.acquire("it")
    assert old.in_place() and at.owner() == os.getpid()
    with pytest.raises(StateLocked, match=f"it is in use by process {os.getpid()}"):
        new.acquire("it")
    at.lock.unlink()
    assert not old.in_place() and at.owner() is None
    new.acquire("it")
    old.release()
    assert new.in_place() and not old.in_place()
    new.release()
    assert not at.home.exists()


def test_which_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uses_worker({"worker": "process"}) and not uses_worker({"worker": "in-process"})
    assert not uses_worker({}) and not uses_worker({"worker": "auto"})
    monkeypatch.setitem(sys.modules, client._DEPLOYED, sys)
    assert uses_worker({}) and not uses_worker({"worker": "in-process"})
    with pytest.raises(ConfigError, match="node-config worker='maybe'"):
        uses_worker({"worker": "maybe"})


def given(request: Request, node: dict[str, Any]) -> str:
    """What the program below serves."""
    records = request.to_records().config_records
    geo, config = dict(records["geo"]), dict(records["config"])
    return json.dumps([{**node, "worker": "process"}, geo, config])


THIN = """
import json, sys
from pathlib import Path
sys.path.insert(0, str(Path("apps/diloco").resolve()))
import client_app
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
node, geo, config = json.loads(sys.argv[1])
records = RecordDict({"geo": ConfigRecord(geo), "config": ConfigRecord(config)})
message = Message(records, 7, "train")
message.metadata.__dict__["_message_id"] = "m1"
reply = client_app.app(message, Context(1, 7, node, RecordDict(), {}))
heavy = sorted({"torch", "transformers", "datasets", "safetensors"} & sys.modules.keys())
print(reply.content.config_records["geo"]["status"], len(reply.content["arrays"]), heavy)
"""


def test_the_client_app_serves_a_request_and_imports_no_torch(
    desk: Desk, north: dict[str, Any], ended: Callable[[], None]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", THIN, given(desk.request(1), north)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"done {len(desk.initial)} []"
    # The worker lives on without the one that started it.
    assert worker_of(north).ppid() != os.getpid()
