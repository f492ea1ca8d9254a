from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from flower_geo.errors import StateError
from flower_geo.launch import environment


def test_children_never_build_environments_nor_report_home(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION", "0")
    monkeypatch.setenv("FLWR_SUPEREXEC_TASK_POLL_INTERVAL", "0.5")
    env = environment.child_environment({"EXTRA": "x"}, home=tmp_path)
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert env["FLWR_TELEMETRY_ENABLED"] == env["RAY_USAGE_STATS_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == "0.5"
    assert env["FLWR_HOME"] == str(tmp_path)
    assert env["EXTRA"] == "x"


def test_this_environment_comes_first_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = str(Path(sys.executable).parent)
    monkeypatch.setenv("PATH", os.pathsep.join(["/usr/bin", ours, "/bin"]))
    parts = environment.child_environment()["PATH"].split(os.pathsep)
    assert parts == [ours, "/usr/bin", "/bin"]


@pytest.mark.parametrize("before", ["", "intern.example", "127.0.0.1", "*"])
def test_no_proxy_for_the_loopback(monkeypatch: pytest.MonkeyPatch, before: str) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("no_proxy", before)
    env = environment.child_environment()
    assert "127.0.0.1" in env["NO_PROXY"] or env["NO_PROXY"] == "*"
    assert env["NO_PROXY"].startswith(before)


def test_folders_follow_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLOWER_GEO_HOME", str(tmp_path / "own"))
    assert environment.state_home() == tmp_path / "own"
    monkeypatch.delenv("FLOWER_GEO_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert environment.state_home() == tmp_path / "flower-geo"
    assert environment.flwr_home({}) == Path.home() / ".flwr"
    assert environment.flwr_home({"FLWR_HOME": str(tmp_path)}) == tmp_path


def test_a_missing_program_is_named_with_its_remedy() -> None:
    assert Path(environment.program("flower-superlink")).is_file()
    with pytest.raises(StateError, match=r"'flower-nothing' is not in .*; install"):
        environment.program("flower-nothing")
