"""Private simulations, with real processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from flower_geo.launch import simulation
from flower_geo.launch.simulation import PrivateSimulation
from flower_geo.observe import read_metrics

pytestmark = pytest.mark.integration

PROBE = Path(__file__).parent / "probe"
TOKEN = "FLOWER_GEO_TEST"


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What all processes of a test inherit; none may be left at its end."""
    value = uuid.uuid4().hex
    monkeypatch.setenv(TOKEN, value)
    yield value
    left = _carrying(value)
    for process in left:
        with contextlib.suppress(psutil.Error):
            process.kill()
    assert not left


def _carrying(value: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and process.status() != psutil.STATUS_ZOMBIE
                and process.environ().get(TOKEN) == value
            ):
                found.append(process)
    return found


def _folders(pid: int) -> list[Path]:
    """Temporary folders of the simulations that a process owns."""
    found = []
    for owner in Path("/tmp").glob("fgeo-*/owner.json"):
        with contextlib.suppress(OSError, ValueError):
            if json.loads(owner.read_text())["pid"] == pid:
                found.append(owner.parent)
    return found


def _start(tmp_path: Path, prompt: str, *words: str) -> subprocess.Popen[str]:
    config = f"min-sites=2 rounds=3 sample-prompt='{prompt}'"
    command = ["run", str(PROBE), "--sites", "2", "-c", config, *words]
    return subprocess.Popen(
        [sys.executable, "-m", "flower_geo.cli", *command],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A background job of a shell starts with SIGINT ignored, and so would its children.
        preexec_fn=_heed_interrupts,
    )


def _heed_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.timeout(300)
def test_a_run_whose_server_is_killed_comes_to_its_end(token: str, tmp_path: Path) -> None:
    command = _start(tmp_path, "kill@2")
    out, err = command.communicate(timeout=280)
    log = tmp_path / "runs" / "probe" / "simulation.log"
    assert command.returncode == 0, f"{out}\n{err}\n{log.read_text()[-3000:]}"
    assert "died; submitting again" in out and "It was a probe." in out
    events = read_metrics(tmp_path / "runs" / "probe" / "metrics.jsonl")
    rounds = [event["round"] for event in events if event["event"] == "round"]
    assert rounds == [1, 2, 3]
    sites = sorted(path.name for path in (tmp_path / "runs" / "probe" / "sites").iterdir())
    assert sites == ["probe-0", "probe-1"]
    assert not _folders(command.pid)
    assert not (tmp_path / "flwr").exists()


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_leaves_nothing_behind(
    token: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = _start(tmp_path, "slow")
    deadline = time.monotonic() + 60
    pid_file = tmp_path / "runs" / "probe" / "server.pid"
    while not pid_file.exists() and command.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    command.send_signal(number)
    out, err = command.communicate(timeout=60)
    assert command.returncode == code, f"{out}\n{err}"
    assert "Traceback" not in err
    assert not _carrying(token)
    assert not _folders(command.pid)


@pytest.mark.timeout(300)
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_a_run_whose_command_is_killed_is_taken_up(token: str, tmp_path: Path) -> None:
    command = _start(tmp_path, "slow")
    folder = tmp_path / "runs" / "probe"
    deadline = time.monotonic() + 120
    while not any(e["event"] == "round" for e in read_metrics(folder / "metrics.jsonl")):
        assert time.monotonic() < deadline and command.poll() is None
        time.sleep(0.05)
    attach = [sys.executable, "-m", "flower_geo.cli", "run", "--attach", "probe", "--plain"]
    second = subprocess.run(attach, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert second.returncode == 1 and f"(pid {command.pid}) looks after" in second.stderr
    command.kill()
    command.communicate()
    third = subprocess.run(attach, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert third.returncode == 0, f"{third.stdout}\n{third.stderr}"
    events = read_metrics(folder / "metrics.jsonl")
    assert [event["round"] for event in events if event["event"] == "round"] == [1, 2, 3]
    assert [e["resumed_from"] for e in events if e["event"] == "start"][-1] >= 1
    assert not _folders(command.pid)
    fourth = subprocess.run(attach, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert fourth.returncode == 0 and "is finished: completed" in fourth.stdout


@pytest.mark.timeout(120)
@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")
def test_what_a_killed_command_left_is_cleared_away(token: str, tmp_path: Path) -> None:
    code = f"""
import time
from pathlib import Path
from flower_geo.launch.simulation import PrivateSimulation
with PrivateSimulation(2, log=Path({str(tmp_path / "log")!r}), state=Path({str(tmp_path)!r})):
    print("ready", flush=True)
    time.sleep(60)
"""
    command = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    with command:
        assert command.stdout is not None
        assert command.stdout.readline() == "ready\n"
        assert _folders(command.pid)
        command.kill()
    deadline = time.monotonic() + 20
    while any("flower-superlink" in " ".join(_words(p)) for p in _carrying(token)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    simulation.sweep()
    assert not _folders(command.pid)


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return list(process.cmdline())
    return []


@pytest.mark.timeout(120)
def test_a_superlink_that_died_is_started_again(token: str, tmp_path: Path) -> None:
    with PrivateSimulation(2, log=tmp_path / "log", state=tmp_path / "state") as private:
        assert private.cli.nodes() == []
        assert private.superlink is not None
        first = private.superlink
        first.kill()
        assert not private.alive()
        private.renew()
        assert private.alive() and private.superlink != first
        folder = private.folder
    assert not folder.exists() and not private.alive()
