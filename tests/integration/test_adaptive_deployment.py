"""Codecs chosen by the speed of a line, on real processes: one site behind a slow relay."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flower_geo.launch.cluster import LocalCluster
from flower_geo.observe import read_metrics
from tests.integration.relay import Relay

REPO = Path(__file__).resolve().parents[2]
FLOWER_GEO = Path(sys.executable).with_name("flower-geo")

#: Bytes a second, each way.
RATE = 400_000.0
LADDER = (
    "bf16", "int8(block=256)", "int4(block=64)", "topk(density=0.05,chunk=4096)|int4(block=64)",
)  # fmt: skip

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_site_behind_a_slow_line_steps_down_and_the_other_does_not(tmp_path: Path) -> None:
    config = (
        f'run-name="line" run-dir="{tmp_path}" model="gpt2-nano" seq-len=32 rounds=6 '
        "batch-size=1 min-sites=2 inner-steps=2 warmup-steps=0 eval-every=0 eval-tokens=64 "
        'sample-tokens=0 codec-up="adaptive" comm-target="4"'
    )
    command = [str(FLOWER_GEO), "run", str(REPO / "apps/diloco"), "line", "--plain", "-c", config]
    with LocalCluster(2, name="line", folder=tmp_path / "c") as cluster:
        with Relay(cluster.address, rate=RATE) as relay:
            node = cluster.supernodes[0]
            node.superlink = relay.address
            node.restart()
            subprocess.run(command, check=True, cwd=tmp_path, timeout=540)
    answers = [e for e in read_metrics(tmp_path / "line" / "metrics.jsonl") if e["event"] == "site"]
    slow = [e for e in answers if e["site"] == "site-0" and e["status"] == "accepted"]
    fast = [e for e in answers if e["site"] == "site-1" and e["status"] == "accepted"]
    assert len(slow) == len(fast) == 6
    # Flower's own pauses count as sending, so small messages seem slower than they were;
    # the other site has no such line.
    assert RATE / 5 < slow[-1]["speed_up"] < RATE * 2 < fast[-1]["speed_up"]
    ended = [LADDER.index(site[-1]["codec_up"]) for site in (slow, fast)]
    assert ended[0] >= 2 and ended[1] <= 1
