"""The bytes that the metrics name are those a socket sees."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from flower_geo.data import load_tokenizer
from flower_geo.launch.cluster import LocalCluster
from flower_geo.observe import read_metrics
from tests.integration.relay import Relay

REPO = Path(__file__).resolve().parents[2]
FLOWER_GEO = Path(sys.executable).with_name("flower-geo")

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(400)]


def test_bytes_in_the_metrics_are_the_bytes_on_the_socket_within_two_percent(
    tmp_path: Path,
) -> None:
    # Flower asks for every tensor by itself, with 0.9 kB of headers: the tensors are large.
    tokenizer = load_tokenizer()
    shape = GPT2Config(
        n_layer=4, n_embd=384, n_head=6, n_positions=32, vocab_size=len(tokenizer)
    )  # fmt: skip
    GPT2LMHeadModel(shape).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = (
        f'run-name="wire" run-dir="{tmp_path}" model="{tmp_path}/model" seq-len=32 rounds=2 '
        f'tokenizer="{tmp_path}/model" batch-size=1 min-sites=1 inner-steps=1 warmup-steps=0 '
        'eval-every=0 eval-tokens=64 sample-tokens=0 codec-up="bf16" codec-down="fp32"'
    )
    command = [str(FLOWER_GEO), "run", str(REPO / "apps/diloco"), "wire", "--plain", "-c", config]
    with LocalCluster(1, name="wire", folder=tmp_path / "c") as cluster:
        with Relay(cluster.address) as relay:
            node = cluster.supernodes[0]
            node.superlink = relay.address
            node.restart()
            up, down = relay.up, relay.down
            subprocess.run(command, check=True, cwd=tmp_path, timeout=300)
            up, down = relay.up - up, relay.down - down
    events = read_metrics(tmp_path / "wire" / "metrics.jsonl")
    said_up = sum(event.get("bytes_up", 0) for event in events if event["event"] != "site")
    said_down = sum(event.get("bytes_down", 0) for event in events if event["event"] != "site")
    assert said_up > 2e7 and said_down > 2e7
    assert up == pytest.approx(said_up, rel=0.02)
    assert down == pytest.approx(said_down, rel=0.02)
