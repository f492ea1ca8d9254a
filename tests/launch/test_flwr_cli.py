from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.errors import RunFailed
from flower_geo.launch import flwr_cli
from flower_geo.launch.flwr_cli import FlwrCli, RunStatus, SuperLinkUnreachable, toml_table

SCALARS = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True), SCALARS))
def test_every_value_survives_the_file_it_is_passed_in(values: dict[str, object]) -> None:
    assert tomllib.loads(toml_table(values)) == values


def _answering(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: str, code: int = 0
) -> FlwrCli:
    """A ``flwr`` that notes its arguments and configuration files, and answers."""
    tool = tmp_path / "flwr"
    (tmp_path / "answer").write_text(answer)
    tool.write_text(
        f'#!/bin/sh\ncd "{tmp_path}"\nprintf "%s\\n" "$@" > arguments\n'
        'for word in "$@"; do case "$word" in *.toml) cat "$word" >> values;; esac; done\n'
        f"cat answer\nexit {code}\n"
    )
    tool.chmod(0o755)
    monkeypatch.setattr(flwr_cli, "program", lambda name: str(tmp_path / name))
    return FlwrCli("geo", tmp_path)


def test_a_run_is_submitted_with_files_of_values(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cli = _answering(monkeypatch, tmp_path, '{"success": true, "run-id": "17"}')
    values = {"sample-prompt": 'it\'s "so"\n', "rounds": 3}
    assert cli.submit(tmp_path / "app", values, {"num-supernodes": 4}) == "17"
    arguments = (tmp_path / "arguments").read_text().split("\n")
    assert arguments[:3] == ["run", str(tmp_path / "app"), "geo"]
    assert tomllib.loads((tmp_path / "values").read_text()) == {**values, "num-supernodes": 4}


def test_the_status_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = [{"status": "finished:failed", "status-details": "boom"}]
    cli = _answering(monkeypatch, tmp_path, json.dumps({"success": True, "runs": runs}))
    status = cli.status("17")
    assert status == RunStatus("finished:failed", "boom")
    assert status.finished and not status.completed
    assert RunStatus("finished:completed", "").completed
    assert not RunStatus("running", "").finished


def test_a_refusal_with_exit_code_0_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = "Using SuperLink: geo\\n\\nrun 17 is not known"
    cli = _answering(monkeypatch, tmp_path, f'{{"success": false, "error-message": "{message}"}}')
    with pytest.raises(RunFailed, match=r"^'flwr list' was refused: run 17 is not known$"):
        cli.status("17")


def test_a_superlink_that_is_away_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    message = "Connection to the SuperLink is unavailable. Please check"
    cli = _answering(monkeypatch, tmp_path, f'{{"success": false, "error-message": "{message}"}}')
    with pytest.raises(SuperLinkUnreachable, match="connection 'geo' does not answer"):
        cli.nodes()


def test_noise_around_the_answer_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nodes = '{"success": true, "nodes": [{"node-id": "5", "status": "online"}]}'
    cli = _answering(monkeypatch, tmp_path, "warning {odd}\n" + nodes + "\nbye\n", code=0)
    assert [(node.node_id, node.status) for node in cli.nodes()] == [("5", "online")]


def test_a_crash_of_flwr_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cli = _answering(monkeypatch, tmp_path, "Traceback\nImportError: no module\n", code=1)
    with pytest.raises(RunFailed, match="ImportError: no module"):
        cli.status("17")


def test_settings_of_a_killed_command_are_cleared_away(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "pass"])
    dead.wait()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = [f"flower-geo-{os.getpid()}-aa", "flower-geo-mine-aa", "flower-geo-tests", "else"]
    for name in (*names, f"flower-geo-{dead.pid}-aa"):
        (tmp_path / name).mkdir()
    flwr_cli._clear_abandoned()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
