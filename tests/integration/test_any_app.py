"""Compression around an ordinary Flower app, in Flower's simulation and on real processes."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from flwr.serverapp.strategy import Result

from flower_geo.launch.cluster import LocalCluster
from flower_geo.launch.flwr_cli import FlwrCli
from flower_geo.launch.simulation import PrivateSimulation
from tests.compression.stock import apart, grid, make, run
from tests.integration.anyapp import client_app

APP = Path(__file__).parent / "anyapp"
QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05", "OMP_NUM_THREADS": "1"}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

Outcome = tuple[dict[str, np.ndarray], dict[str, Any]]


def finished(
    cli: FlwrCli, out: Path, config: dict[str, Any], federation: dict[str, Any], log: Path
) -> Outcome:
    """Run the app to its end; the final weights, and metrics and bytes."""
    run_id = cli.submit(APP, {"out": str(out), **config}, federation)
    deadline = time.monotonic() + 250
    asked = time.monotonic()
    # to ask Flower costs a second of a core, to look for the file nothing
    while not out.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
        if time.monotonic() - asked > 20:
            asked = time.monotonic()
            if cli.status(run_id).finished:
                break
    while not (status := cli.status(run_id)).finished and time.monotonic() < deadline:
        time.sleep(1.0)
    assert status.completed, f"{status}\n{log.read_text()[-5000:]}"
    with np.load(out.with_suffix(".npz"), allow_pickle=False) as arrays:
        return dict(arrays), json.loads(out.read_text())


@functools.cache
def plain(strategy: str, rounds: int, clients: int = 2) -> Result:
    """The same training without compression, in this process."""
    return run(make(strategy, nodes=clients), grid(mod=(), nodes=range(1, 1 + clients)), rounds)


def distance(found: Outcome, reference: Result) -> float:
    assert list(found[0]) == list(reference.arrays)
    arrays = ArrayRecord({name: Array(value) for name, value in found[0].items()})
    return apart(Result(arrays), reference)


def check(found: Outcome, reference: Result, rounds: int) -> None:
    weights, metrics = found
    assert distance(found, reference) < 0.01
    assert weights["steps"] == pytest.approx(reference.arrays["steps"].numpy())
    assert len(metrics["train"]) == len(metrics["evaluate"]) == rounds
    assert metrics["traffic"]["refused"] == 0
    assert metrics["traffic"]["plain_up"] > 3.5 * metrics["traffic"]["up"]


def in_simulation(
    tmp_path: Path, configs: dict[str, dict[str, Any]], clients: int = 2
) -> dict[str, Outcome]:
    log = tmp_path / "log"
    with PrivateSimulation(clients, log=log, state=tmp_path / "state", env=QUICK) as simulation:
        federation = simulation.federation_config({})
        return {
            name: finished(
                simulation.cli, tmp_path / name, {"clients": clients, **config}, federation, log
            )
            for name, config in configs.items()
        }


def test_in_simulation(tmp_path: Path) -> None:
    found = in_simulation(tmp_path, {"int8": {"rounds": 2}})["int8"]
    check(found, plain("FedAvg", 2), 2)
    train = found[1]["train"]
    # weights that are there already are not sent again
    assert train["2"]["geo-plain-bytes-down"] > 10 * train["2"]["geo-bytes-down"]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stock_strategies_in_simulation(tmp_path: Path) -> None:
    strategies = ("FedAvg", "FedAdam", "FedMedian", "Krum")
    exact = {"uplink": "fp32", "downlink": "fp32"}
    configs = {f"{s}-int8": {"strategy": s} for s in strategies}
    configs |= {f"{s}-exact": {"strategy": s} | exact for s in strategies}
    found = in_simulation(tmp_path, configs, clients=4)  # of two, Krum takes any
    for each in strategies:
        check(found[f"{each}-int8"], plain(each, 3, 4), 3)
        # not to the bit: Flower hands out node ids, and so the order of summing, by chance
        assert distance(found[f"{each}-exact"], plain(each, 3, 4)) < 1e-6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    folder = tmp_path_factory.mktemp("cluster") / "c"
    with LocalCluster(
        2, name="anyapp", folder=folder, env=QUICK, site_config={1: {"mod": False}}
    ) as started:
        yield started


def test_in_deployment_with_a_stock_client(cluster: LocalCluster, tmp_path: Path) -> None:
    log = cluster.superlink.log
    weights, metrics = finished(cluster.cli, tmp_path / "out", {"rounds": 2}, {}, log)
    assert len(metrics["train"]) == len(metrics["evaluate"]) == 2
    assert metrics["evaluate"]["2"]["eval-loss"] < metrics["evaluate"]["1"]["eval-loss"]
    assert weights["steps"] == 2 * client_app.STEPS
    train = [metrics["train"][n] for n in ("1", "2")]
    whole = train[0]["geo-plain-bytes-up"] / 2
    for each in train:  # one of two compresses
        assert whole < each["geo-bytes-up"] < 1.4 * whole
    # weights that are there already are not sent again
    assert train[1]["geo-bytes-down"] < 1.1 * whole
    assert metrics["traffic"]["refused"] == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_deployment_without_the_wrapper(cluster: LocalCluster, tmp_path: Path) -> None:
    config = {"rounds": 1, "downlink": ""}
    weights, _ = finished(cluster.cli, tmp_path / "out", config, {}, cluster.superlink.log)
    assert weights["steps"] == client_app.STEPS  # of the stock client alone
    assert "wrap the server's strategy" in cluster.supernodes[0].log.read_text()
