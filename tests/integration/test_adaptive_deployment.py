"""Codecs chosen by what is measured: two real SuperNodes, one of them behind a slow line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flower_geo.compression import codec
from flower_geo.compression.adaptive import ladder
from flower_geo.launch.cluster import LocalCluster
from flower_geo.observe import read_metrics
from tests.integration.relay import Relay
from tests.integration.test_deployment import committed, finished, start_app

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]

SLOW, FAST = "site-1", "site-0"
LADDER = "fp32 > int8(block=256) > int4(block=64) > topk(density=0.05,chunk=4096)|int4(block=64)"
SETTINGS: dict[str, Any] = {
    "model": "gpt2-nano", "rounds": 5, "inner-steps": 10, "seq-len": 64, "batch-size": 4,
    "warmup-steps": 2, "eval-tokens": 256, "eval-every": 0, "min-sites": 2, "sample-tokens": 0,
    "codec-up": "adaptive", "codec-ladder": LADDER, "comm-target": "4",
}  # fmt: skip


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    env = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05", "OMP_NUM_THREADS": "1"}
    with LocalCluster(2, name="itest-lines", folder=tmp_path / "c", env=env) as started:
        yield started


def test_the_site_behind_a_slow_line_sends_fewer_bits(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    with Relay(cluster.address) as relay:
        node = cluster.supernodes[1]
        node.superlink = relay.address
        node.restart()
        relay.slow(rate=400_000.0)
        output = finished(start_app("diloco", "itest-lines", tmp_path, "lines", SETTINGS))
    folder = tmp_path / "lines"
    assert committed(folder) == [1, 2, 3, 4, 5], output
    told = [e for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "site"]
    sites = {(e["round"], e["site"]): e for e in told if e["status"] == "accepted"}
    rungs = [codec(rung).spec for rung in ladder(LADDER)]
    used = {
        site: [rungs.index(sites[round, site]["codec_up"]) for round in range(1, 6)]
        for site in (FAST, SLOW)
    }
    assert used[SLOW][-1] > used[FAST][-1], used
    # Sites with different codecs were folded into one mean, and what the line takes fell.
    last, first = sites[5, SLOW], sites[1, SLOW]
    assert last["bytes_up"] < first["bytes_up"] or used[SLOW][0] == used[SLOW][-1] > 0, used
    assert last["speed_up"] < 0.5 * sites[5, FAST]["speed_up"]
