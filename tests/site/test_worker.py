"""The worker process: real ones, killed, stopped, asked twice, told to end."""

from __future__ import annotations

import os
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
from flower_geo.site import client, work
from flower_geo.site.client import ask_worker, uses_worker
from flower_geo.site.place import Place
from tests.site.requests import Desk, blobs, folder_of, state_of

ROOT = Path(__file__).resolve().parents[2]
#: A round of some seconds, with a snapshot every second or so.
LONG: dict[str, Any] = {"inner-steps": 80, "batch-size": 16, "snapshot-steps": 2}


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
    place = place_of(north)
    for private in (place.log, place.lock, place.home / "socket"):
        assert private.stat().st_mode & 0o077 == 0
    assert place.home.stat().st_mode & 0o077 == 0
    ended()
    assert not place.home.exists()
    assert not [p for p in place.folder.iterdir() if p.name.startswith((".", "snapshot"))]


def test_errors_come_back_as_they_were(
    desk: Desk, north: dict[str, Any], ended: Callable[[], None]
) -> None:
    with pytest.raises(DataError, match="/not/here"):
        ask_worker("greet_request", desk.request(0), {**north, "data": "/not/here"})
    with pytest.raises(ConfigError, match="toaster"):
        ask_worker("greet_request", desk.request(0), {**north, "device": "toaster"})
    with pytest.raises(WorkerFailed, match="cannot be handed"):
        odd = replace(desk.request(0), config={**desk.request(0).config, "data": b"x"})
        ask_worker("greet_request", odd, north)
    with state_of(north), pytest.raises(StateLocked, match="is in use by process"):
        ask_worker("greet_request", desk.request(0), north)


def test_a_worker_killed_and_one_stopped_in_a_round_lose_no_bit(
    long_desk: Desk, north: dict[str, Any], undisturbed: Reply, ended: Callable[[], None]
) -> None:
    future = asked(north, long_desk.request(1, evaluate=True))
    wait_until(lambda: stored_steps(north))
    first, steps = worker_of(north), stored_steps(north)
    first.kill()
    wait_until(lambda: "goes on in round 1 after step" in place_of(north).log.read_text())
    wait_until(lambda: stored_steps(north) > steps)
    second = worker_of(north)
    second.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    wait_until(lambda: place_of(north).owner() != second.pid, 10)
    assert time.monotonic() - began < 4
    same(future.result(60), undisturbed)
    assert place_of(north).log.read_text().count("goes on in round 1 after step") == 2
    assert not (folder_of(north) / "snapshot").exists()


def test_workers_told_to_end_snapshot_and_the_round_goes_on(
    long_desk: Desk, north: dict[str, Any], undisturbed: Reply, ended: Callable[[], None]
) -> None:
    # None of its own accord: the snapshots found are those of the notices.
    future = asked({**north, "snapshot-steps": 0}, long_desk.request(1, evaluate=True))
    steps, log = 0, place_of(north).log
    for lives, number in ((1, signal.SIGTERM), (2, signal.SIGUSR1)):
        wait_until(lambda: log.exists() and log.read_text().count(" training\n") == lives)
        time.sleep(0.7)  # some steps
        told = worker_of(north)
        told.send_signal(number)
        wait_until(lambda: place_of(north).owner() != told.pid, 10)
        assert stored_steps(north) > steps
        steps = stored_steps(north)
    same(future.result(60), undisturbed)


def test_a_request_asked_twice_at_once_is_trained_once(
    desk: Desk, north: dict[str, Any], ended: Callable[[], None]
) -> None:
    first = asked(north, desk.request(1))
    second = asked(north, replace(desk.request(1), attempt=2))
    same(first.result(60), second.result(60))
    assert first.result().metrics == second.result().metrics  # the clocks' numbers, too
    # Of two that were started, perhaps, one found the place taken.
    assert place_of(north).log.read_text().count("train_request of round 1: done") == 2


def test_workers_that_die_again_and_again_end_the_request(
    desk: Desk, north: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ended: Callable[[], None]
) -> None:
    monkeypatch.setattr(client, "MODULE", "flower_geo.site.not_there")
    with pytest.raises(WorkerFailed, match="lost 3 times in a row .* exit code 1; see") as caught:
        ask_worker("greet_request", desk.request(0), north)
    assert "\n" not in str(caught.value)


def test_a_worker_ends_by_itself_and_leaves_nothing(
    desk: Desk, north: dict[str, Any], ended: Callable[[], None]
) -> None:
    ask_worker("greet_request", desk.request(0), {**north, "worker-idle": 1})
    place = place_of(north)
    first = worker_of(north)
    wait_until(lambda: place.owner() is None, 10)
    wait_until(lambda: not place.home.exists(), 5)
    assert first.wait(10) in (0, None)
    # What a killed one leaves does not keep the next from starting.
    ask_worker("greet_request", desk.request(0), north)
    worker_of(north).kill()
    wait_until(lambda: place.owner() is None, 10)
    assert (place.home / "socket").exists() and place.process() is None
    assert ask_worker("greet_request", desk.request(0), north).status == "done"


def test_a_deep_state_folder_is_no_hindrance(desk: Desk, north: dict[str, Any]) -> None:
    deep = {**north, "state-dir": north["state-dir"] + "/deep" * 40, "worker-idle": 0}
    assert ask_worker("greet_request", desk.request(0), deep).status == "done"
    wait_until(lambda: not place_of(deep).home.exists(), 10)


def test_a_worker_of_another_environment_makes_room(
    desk: Desk, north: dict[str, Any], monkeypatch: pytest.MonkeyPatch, ended: Callable[[], None]
) -> None:
    ask_worker("greet_request", desk.request(0), north)
    first = worker_of(north).pid
    monkeypatch.setenv("HF_SOMETHING", "new")
    assert ask_worker("greet_request", desk.request(0), north).status == "done"
    assert worker_of(north).pid != first


def test_which_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uses_worker({"worker": "process"}) and not uses_worker({"worker": "in-process"})
    assert not uses_worker({}) and not uses_worker({"worker": "auto"})
    monkeypatch.setitem(sys.modules, client._DEPLOYED, sys)
    assert uses_worker({}) and not uses_worker({"worker": "in-process"})
    with pytest.raises(ConfigError, match="node-config worker='maybe'"):
        uses_worker({"worker": "maybe"})


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
    import json

    records = desk.request(1).to_records().config_records
    given = [{**north, "worker": "process"}, dict(records["geo"]), dict(records["config"])]
    done = subprocess.run(
        [sys.executable, "-c", THIN, json.dumps(given)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"done {len(desk.initial)} []"
    # The worker lives on without the one that started it.
    assert worker_of(north).ppid() != os.getpid()
