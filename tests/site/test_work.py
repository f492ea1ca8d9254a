"""What a site does with requests: once, from the right state, and healing what is damaged."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.errors import ConfigError, DataError, FlowerGeoError, StateLocked, TrainingError
from flower_geo.messages import Reply
from flower_geo.models import load_state
from flower_geo.site.tasks import pretrain
from flower_geo.site.work import evaluate_request, greet_request, train_request
from flower_geo.training import InnerLoop
from tests.site.requests import Desk, blobs, folder_of, state_of, update


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes any training step an error."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it trained")

    monkeypatch.setattr(InnerLoop, "run", refuse)


# -- greeting and evaluation ----------------------------------------------------


def test_a_greeting_says_what_the_site_is_and_holds(desk: Desk, north: dict[str, Any]) -> None:
    for _ in range(2):
        reply = greet_request(desk.request(0), north)
        assert (reply.status, reply.site, reply.data) == ("done", "north", "north.txt")
        assert (reply.held_version, reply.held_hash) == (0, desk.hash)
        assert reply.metrics["train-tokens"] > 1000 and reply.metrics["held-out-tokens"] > 16
    other = replace(desk.request(0), run_uid="other", base_hash="of another model")
    assert greet_request(other, north).held_hash == desk.hash
    later = replace(desk.request(0), run_uid="third", version=5)
    assert greet_request(later, north).held_version == -1


def test_evaluation_needs_the_base_it_is_asked_for(desk: Desk, north: dict[str, Any]) -> None:
    reply = evaluate_request(desk.request(3), north)
    assert reply.metrics["loss-before"] == pytest.approx(8.3, abs=0.3)
    assert reply.metrics["eval-tokens"] == 60
    lacking = replace(desk.request(3), version=2, base_hash="elsewhere")
    assert evaluate_request(lacking, north).status == "need"
    ones = {name: torch.zeros_like(tensor) for name, tensor in desk.initial.items()}
    uniform = evaluate_request(desk.snapshot(ones, 2), north)
    assert uniform.metrics["loss-before"] == pytest.approx(torch.log(torch.tensor(4096.0)).item())


# -- once, and from the right state ---------------------------------------------


def test_a_round_is_trained_once_also_after_a_restart(
    desk: Desk, north: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    first = train_request(desk.request(1), north)
    assert (first.round, first.version, first.fingerprint) == (1, 0, desk.config.fingerprint())
    assert first.metrics["tokens"] == 2 * 2 * 15 and first.metrics["consumed"] == 4
    pretrain.workbench.cache_clear()  # what a new process starts with
    request.getfixturevalue("untrained")
    again = train_request(replace(desk.request(1), attempt=2, incarnation=3), north)
    assert again.metrics == first.metrics and blobs(again) == blobs(first)
    assert replace(again, arrays=None) == replace(first, arrays=None)
    with pytest.raises(AssertionError, match="it trained"):
        train_request(replace(desk.request(1), fingerprint="another"), north)


def test_a_damaged_cached_reply_is_trained_again_to_the_same_bits(
    desk: Desk, north: dict[str, Any]
) -> None:
    first = train_request(desk.request(1), north)
    file = folder_of(north) / "gen-000001" / "reply.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x77")
    again = train_request(desk.request(1), north)
    assert blobs(again) == blobs(first)


def test_a_site_goes_on_from_the_round_that_was_accepted(desk: Desk, north: dict[str, Any]) -> None:
    train_request(desk.request(1), north)
    lost = train_request(desk.request(2, accepted=1), north)
    after = train_request(desk.request(3, accepted=1), north)
    assert lost.metrics["consumed"] == after.metrics["consumed"] == 8
    state = state_of(north)
    one, two, three = (state.load(round) for round in (1, 2, 3))
    assert one and two and three and (two.parent, three.parent) == (1, 1)
    # Both went on from the optimizer of round 1, after its two steps.
    steps = {float(t) for k, t in three.inner.items() if k.startswith("step/")}
    assert steps == {4.0}


def test_a_site_that_lost_its_state_reads_on_where_it_stopped(
    desk: Desk, north: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    reply = train_request(desk.request(4, accepted=3, consumed=40), north)
    assert reply.metrics["consumed"] == 44 and reply.metrics["examples"] == 4
    assert "no state of round 3" in caplog.text
    found = state_of(north).load(4)
    assert found is not None
    assert {float(t) for k, t in found.inner.items() if k.startswith("step/")} == {2.0}


def test_the_optimizer_starts_anew_when_it_is_not_kept(north: dict[str, Any]) -> None:
    desk = Desk(**{"keep-optimizer": False, "error-feedback": False})
    train_request(desk.request(1), north)
    found = state_of(north).load(1)
    assert found is not None and found.inner == {} and found.residual == {}
    assert train_request(desk.request(2, accepted=1), north).metrics["consumed"] == 8


def test_a_lossless_codec_sends_weights_and_keeps_no_residual(north: dict[str, Any]) -> None:
    desk = Desk(**{"codec-up": "fp32"})
    reply = train_request(desk.request(1), north)
    assert reply.kind == "weights" and reply.codec == "fp32"
    local = update(reply)
    assert local.keys() == desk.initial.keys()
    assert any(not torch.equal(local[name], desk.initial[name]) for name in local)


# -- several sites --------------------------------------------------------------


def rounds(desk: Desk, node: dict[str, Any], numbers: range) -> list[dict[str, bytes]]:
    return [blobs(train_request(desk.request(n, accepted=n - 1), node)) for n in numbers]


def test_two_sites_in_one_process_do_not_mix(
    desk: Desk, north: dict[str, Any], south: dict[str, Any], tmp_path: Path
) -> None:
    alone = rounds(desk, {**north, "state-dir": str(tmp_path / "alone")}, range(1, 4))
    torch.manual_seed(99)
    mixed: list[dict[str, bytes]] = []
    for number in range(1, 4):
        mixed += rounds(desk, north, range(number, number + 1))
        theirs = rounds(desk, south, range(number, number + 1))
        assert theirs[0] != mixed[-1]
        evaluate_request(desk.request(0), south)
    assert mixed == alone


SERVE = """
import json, sys
from pathlib import Path
from tests.site.requests import Desk, blobs
from flower_geo.compression import record_blobs
from flower_geo.site.work import train_request
import hashlib
desk, out = Desk(), {}
for node in json.loads(sys.argv[1]):
    for number in (1, 2):
        reply = train_request(desk.request(number, accepted=number - 1), node)
        digest = hashlib.sha256()
        for name, blob in sorted(blobs(reply).items()):
            digest.update(blob)
        out[f"{node['site']}/{number}"] = [digest.hexdigest(), reply.metrics]
print(json.dumps(out))
"""


def test_processes_of_several_sites_at_once_on_one_host(
    desk: Desk, north: dict[str, Any], south: dict[str, Any], tmp_path: Path, untrained: None
) -> None:
    """Each in a process of its own, with one state folder and one cold data cache."""
    cache = str(tmp_path / "cache")
    nodes = [{**north, "cache-dir": cache}, {**south, "cache-dir": cache}]
    # A third site shares a text, so that two processes prepare the same one.
    nodes.append({**nodes[0], "site": "west"})
    root = str(Path(__file__).resolve().parents[2])
    groups = [[nodes[0]], [nodes[1], nodes[2]]]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SERVE, json.dumps(group)], cwd=root,
            stdout=subprocess.PIPE, text=True,
        )
        for group in groups
    ]  # fmt: skip
    said: dict[str, Any] = {}
    for process in processes:
        out, _ = process.communicate(timeout=100)
        assert process.returncode == 0
        said |= json.loads(out)
    assert len({digest for digest, _ in said.values()}) == 4  # north and west read the same
    assert said["north/1"][0] == said["west/1"][0]
    # This process answers what they trained without training.
    for node in nodes:
        reply = train_request(desk.request(2, accepted=1), node)
        assert reply.metrics == said[f"{node['site']}/2"][1]


def test_a_site_at_work_elsewhere_is_said_to_be(desk: Desk, north: dict[str, Any]) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom flower_geo.site.state import SiteState\n"
        "with SiteState(Path(sys.argv[1]), 'run', 'uid', 'north'):\n"
        "    print('held', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, north["state-dir"]], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(StateLocked, match=f"process {process.pid} "):
            train_request(desk.request(1), north)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    assert train_request(desk.request(1), north).status == "done"


# -- what a site decides for itself ---------------------------------------------


def test_a_site_may_train_more_or_less_under_the_runs_schedule(
    desk: Desk, north: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, Any]] = []
    run = InnerLoop.run

    def watched(self: InnerLoop, *args: Any, **kwargs: Any) -> Any:
        seen.append((self.config, kwargs))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InnerLoop, "run", watched)
    own = {"inner-steps": 3, "batch-size": "1", "grad-accum": 2, "rounds": 1, "inner-lr": 9.0}
    reply = train_request(desk.request(2), {**north, **own})
    assert (reply.metrics["steps"], reply.metrics["examples"]) == (3, 6)
    config, given = seen[0]
    assert (config.total_steps, config.grad_accum, config.lr) == (10, 2, desk.config.inner_lr)
    assert (given["steps"], given["position"], given["span"]) == (3, 2.0, 2.0)


def test_rounds_by_time_take_at_least_a_step_and_end(desk: Desk, north: dict[str, Any]) -> None:
    short = train_request(desk.request(1), {**north, "inner-seconds": 1e-6})
    assert short.metrics["steps"] == 1 and short.metrics["consumed"] == 2
    began = time.perf_counter()
    longer = train_request(desk.request(2), {**north, "inner-seconds": 0.5})
    assert longer.metrics["steps"] >= 1 and 0.5 <= longer.metrics["seconds"]
    assert longer.metrics["tokens"] == longer.metrics["steps"] * 30
    assert time.perf_counter() - began < 30


@pytest.mark.parametrize(
    ("own", "words"),
    [({"inner-steps": 0}, "node-config inner-steps=0"), ({"batch-size": "x"}, "batch-size='x'"),
     ({"threads": -1}, "node-config threads"), ({"device": "cuda:99"}, "device='cuda:99'"),
     ({"device": "toaster"}, "device='toaster'"), ({"device": "meta"}, "device='meta'"),
     ({"device": ""}, "device=''"), ({"num-partitions": "x"}, "num-partitions='x'"),
     ({"partition-id": -3}, "partition-id=-3"), ({"data": "/not/here"}, "/not/here")],
)  # fmt: skip
def test_a_node_config_that_cannot_be_used(
    desk: Desk, north: dict[str, Any], own: Any, words: str
) -> None:
    with pytest.raises((ConfigError, DataError)) as caught:
        greet_request(desk.request(0), {**north, **own})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_training_that_cannot_go_on_leaves_no_generation(desk: Desk, north: dict[str, Any]) -> None:
    huge = {name: torch.full_like(tensor, 1e30) for name, tensor in desk.initial.items()}
    with pytest.raises(TrainingError, match="not finite"):
        train_request(desk.snapshot(huge, 1), north)
    assert state_of(north).generations() == []
    assert train_request(desk.request(1), north).status in ("done", "need")


@pytest.mark.parametrize(
    "changed", [{"inner-steps": "many"}, {"model": "gpt9"}, {"codec-up": "zip"}, {"rounds": -1},
                {"tokenizer": "/not/here"}, {"batch-size": [1, 2]}, {"schedule": b"x"}]
)  # fmt: skip
def test_a_configuration_that_cannot_be_used(
    desk: Desk, north: dict[str, Any], changed: dict[str, Any]
) -> None:
    request = desk.request(1)
    with pytest.raises(FlowerGeoError):
        train_request(replace(request, config={**request.config, **changed}), north)


def test_weights_loaded_for_one_request_do_not_stay_for_the_next(
    desk: Desk, north: dict[str, Any], newer: dict[str, torch.Tensor]
) -> None:
    clean: Reply = train_request(desk.request(1), north)
    found = pretrain.workbench("gpt2-nano", 0, "builtin", 16, "cpu")
    load_state(found.model, newer)
    again = {**north, "state-dir": north["state-dir"] + "-2"}
    assert blobs(train_request(desk.request(1), again)) == blobs(clean)
