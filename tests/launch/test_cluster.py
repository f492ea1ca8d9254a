"""A local deployment, with real processes."""

from __future__ import annotations

import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_geo.errors import ConfigError, StateError
from flower_geo.launch import cluster as cluster_module
from flower_geo.launch import processes
from flower_geo.launch.cluster import LocalCluster
from flower_geo.launch.runs import RunOptions, execute
from flower_geo.observe import read_metrics

PROBE = Path(__file__).parent / "probe"


def _connections(home: Path) -> list[str]:
    file = home / "config.toml"
    return list(tomllib.loads(file.read_text())["superlink"]) if file.exists() else []


def test_node_configs_are_merged_by_site(tmp_path: Path) -> None:
    cluster = LocalCluster(
        2, folder=tmp_path, node_config={"data": "common", "state-dir": "here"},
        site_config={1: {"data": "own", "site": "north"}},
    )  # fmt: skip
    assert cluster.supernodes[0].node_config == {
        "partition-id": 0, "num-partitions": 2, "site": "site-0", "state-dir": "here",
        "data": "common",
    }  # fmt: skip
    assert cluster.supernodes[1].node_config["data"] == "own"
    assert cluster.supernodes[1].node_config["site"] == "north"
    with pytest.raises(ConfigError, match="numbered 0 to 1"):
        LocalCluster(2, folder=tmp_path, site_config={2: {}})
    with pytest.raises(ConfigError, match="at least one site"):
        LocalCluster(0, folder=tmp_path)


def test_a_cluster_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no cluster 'geo' is up"):
        LocalCluster.load(folder=tmp_path)
    (tmp_path / "cluster.json").write_text('{"members": [')
    with pytest.raises(StateError, match=r"cluster\.json cannot be read"):
        LocalCluster.load(folder=tmp_path)


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_an_up_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = LocalCluster(1, folder=tmp_path / "c", flwr_home=tmp_path / "flwr")
    # a node-config that flower-supernode refuses
    monkeypatch.setattr("flower_geo.launch.members.node_config_text", lambda _: "a=b")
    with pytest.raises(StateError, match=r"site-0 \(flower-supernode\) did not start") as caught:
        cluster.up(tethered=True)
    assert "invalid format" in str(caught.value)  # the log's last lines
    assert not any(member.alive() for member in cluster.members)
    assert not [p for member in cluster.members for p in processes.marked(member.mark)]
    assert _connections(tmp_path / "flwr") == []
    assert not (tmp_path / "c" / "cluster.json").exists()


@pytest.mark.integration
@pytest.mark.timeout(120)
def test_a_port_taken_meanwhile_is_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        taken = sock.getsockname()[1]
        cluster = LocalCluster(1, folder=tmp_path / "c", flwr_home=tmp_path / "flwr")
        cluster.superlink.port = cluster.supernodes[0].port = taken
        with cluster:
            assert cluster.superlink.port != taken
            assert cluster.supernodes[0].port != taken
            assert cluster.supernodes[0].node_id


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster of two sites."""
    folder = tmp_path_factory.mktemp("cluster")
    cluster = LocalCluster(2, folder=folder / "geo", flwr_home=folder / "flwr")
    marks = [member.mark for member in cluster.members]
    with cluster:
        yield cluster
        again = LocalCluster.load(folder=folder / "geo")
    assert not any(member.alive() for member in again.members)
    assert not [process for mark in marks for process in processes.marked(mark)]
    assert _connections(folder / "flwr") == ["default", "local"]
    assert sorted(path.name for path in (folder / "geo").iterdir()) == ["logs", "site-0", "site-1"]


@pytest.mark.integration
@pytest.mark.timeout(180)
def test_a_run_goes_on_after_its_server_was_killed(
    up: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FLWR_HOME", str(up.flwr_home))
    monkeypatch.chdir(tmp_path)
    config = ["min-sites=2 rounds=2 sample-prompt='kill@2'"]
    code = execute(RunOptions(str(PROBE), up.connection, config, plain=True))
    shown = capsys.readouterr()
    assert code == 0, f"{shown}\n{processes.last_lines(up.superlink.log, 30)}"
    events = read_metrics(tmp_path / "runs" / "probe" / "metrics.jsonl")
    assert [event["round"] for event in events if event["event"] == "round"] == [1, 2]
    assert (up.folder / "site-1" / "state" / "probe-1").exists()


@pytest.mark.integration
@pytest.mark.timeout(180)
def test_a_failed_run_has_its_reason_and_a_true_exit_code(
    up: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("FLWR_HOME", str(up.flwr_home))
    monkeypatch.chdir(tmp_path)
    options = RunOptions(str(PROBE), up.connection, ["sample-prompt='raise@0'"], plain=True)
    assert execute(options) == 1
    assert "error: probe: asked to raise before the run began" in capsys.readouterr().err


@pytest.mark.integration
@pytest.mark.timeout(180)
def test_a_supernode_is_killed_and_comes_back(up: LocalCluster) -> None:
    assert up.supernodes == LocalCluster.load(folder=up.folder).supernodes
    status = {row.name: row for row in up.status()}
    assert {row.running for row in status.values()} == {True}
    assert [status[f"site-{index}"].online for index in (0, 1)] == ["online", "online"]
    node = up.supernodes[1]
    old_pid, old_id = node.pid, node.node_id
    node.kill()
    assert not node.alive() and not processes.marked(node.mark)
    assert up.supernodes[0].alive() and up.superlink.alive()
    node.restart()
    assert node.alive() and node.pid != old_pid
    assert node.node_id != old_id
    # whoever looks from outside sees the new process
    seen = LocalCluster.load(folder=up.folder).supernodes[1]
    assert seen.pid == node.pid and seen.alive()
    with pytest.raises(ConfigError, match="is up already"):
        LocalCluster(1, folder=up.folder, flwr_home=up.flwr_home).up()


@pytest.mark.integration
@pytest.mark.timeout(180)
def test_a_cluster_outlives_its_command_and_is_ended_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import subprocess
    import sys

    monkeypatch.setenv("FLOWER_GEO_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    base = [sys.executable, "-m", "flower_geo.cli", "cluster"]
    words = ["--sites", "1", "--node-config", "data=x", "--site-config", "0:site=north"]
    began = time.monotonic()
    subprocess.run([*base, "up", *words], check=True, timeout=120)
    try:
        cluster = LocalCluster.load()
        assert cluster.supernodes[0].node_config["site"] == "north"
        assert all(member.alive() for member in cluster.members)
        assert "geo" in _connections(tmp_path / "flwr")
        # a pid that belongs to another process now is left alone
        stranger = processes.start(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            env={}, log=tmp_path / "log",
        )  # fmt: skip
        stored = (cluster.folder / "cluster.json").read_text()
        old = cluster.supernodes[0].pid
        cluster.supernodes[0].kill()
        (cluster.folder / "cluster.json").write_text(
            stored.replace(f'"pid": {old}', f'"pid": {stranger.pid}')
        )
        assert subprocess.run([*base, "status"], timeout=60).returncode == 1
    finally:
        subprocess.run([*base, "down", "--purge"], check=True, timeout=60)
    assert stranger.alive()
    stranger.kill()
    assert not any(member.alive() for member in cluster.members)
    assert "geo" not in _connections(tmp_path / "flwr")
    assert not (tmp_path / "state" / "clusters" / "geo").exists()
    assert time.monotonic() - began < 170
    assert cluster_module.LocalCluster is LocalCluster
