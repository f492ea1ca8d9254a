"""Split learning: the real strategy, the cloud's real process and the real stream, one site."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from flower_geo.compression import unpack
from flower_geo.config import FedAvgLoRAConfig, SplitConfig, parse
from flower_geo.errors import ConfigError, ModelError, RoundError
from flower_geo.strategies import FedAvgLoRA, SplitFineTune, initial_arrays
from flower_geo.strategies.cloud import MODULE
from tests.federation import MemoryGrid
from tests.strategies.runs import Killed, dying, equal, events
from tests.strategies.test_fedavg_lora import SMALL, federation

#: As a whole, by one site: what every split run is compared with.
WHOLE: dict[str, Any] = SMALL | {
    "min-sites": 1, "deadline": 90.0, "aggregation": "avg", "grad-accum": 2, "batch-size": 1,
}  # fmt: skip
PLAIN = {"codec-activations": "fp32", "codec-gradients": "fp32", "stream-deadline": 20.0}


def configured(tmp_path: Path, mode: str = "u-shape", **values: Any) -> SplitConfig:
    top = 1 if mode == "u-shape" else 0
    cut = {"mode": mode, "cut-bottom": 1 - top, "cut-top": top}
    return parse(SplitConfig, {**WHOLE, **PLAIN, **cut, "run-dir": str(tmp_path / "r"), **values})


def run(config: SplitConfig, grid: MemoryGrid) -> dict[str, Tensor]:
    return unpack(SplitFineTune(config).start(grid, initial_arrays(config)).arrays)


def cloud_processes() -> list[psutil.Process]:
    mine = psutil.Process().children(recursive=True)
    return [each for each in mine if MODULE in " ".join(each.cmdline())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """What the unsplit run ends with."""
    tmp_path = tmp_path_factory.mktemp("whole")
    config = parse(FedAvgLoRAConfig, {**WHOLE, "run-dir": str(tmp_path / "r")})
    strategy = FedAvgLoRA(config)
    return unpack(strategy.start(federation(tmp_path, 1), initial_arrays(config)).arrays)


@pytest.mark.parametrize("mode", ["u-shape", "vanilla", "sfl-v1", "sfl-v2"])
def test_one_site_and_the_cloud_are_the_unsplit_run(
    mode: str, tmp_path: Path, whole: dict[str, Tensor]
) -> None:
    config = configured(tmp_path, mode)
    assert equal(run(config, federation(tmp_path, 1)), whole)
    (end,) = events(config, "end")
    assert end["status"] == "completed" and not cloud_processes()
    folder = Path(config.run_dir) / config.run_name
    assert (folder / "model" / "adapter_model.safetensors").exists()
    for name in ("stream.json", "cloud.log"):
        assert (folder / "cloud" / name).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mode", ["cse", "sage"])
def test_a_site_that_learns_from_a_head_of_its_own(mode: str, tmp_path: Path) -> None:
    config = configured(tmp_path, mode, **{"align-every": 2, "inner-steps": 4})
    start = unpack(initial_arrays(config))
    end = run(config, federation(tmp_path, 1))
    assert start.keys() == end.keys()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in end.values())
    # Both halves have moved.
    for layer in ("layers.0.", "layers.1."):
        assert any(layer in name and not torch.equal(start[name], end[name]) for name in end)


def test_the_cloud_s_part_is_never_sent(tmp_path: Path) -> None:
    config = configured(tmp_path, "vanilla")
    grid = federation(tmp_path, 1)
    run(config, grid)
    strategy = SplitFineTune(config)
    sent = {
        name
        for message in grid.pushed
        if "arrays" in message.content
        for name in message.content["arrays"]
    }
    assert sent and not any(name in strategy.model.cloud_names for name in sent)
    assert strategy.model.cloud_names and all("layers.1." in n for n in strategy.model.cloud_names)


LOSSY = {
    "codec-activations": "int8(block=64)", "codec-gradients": "int4(block=64)",
    "delta-coding": True, "activation-noise": 0.01, "dropout": 0.1, "inner-steps": 8,
    "snapshot-steps": 2, "rounds": 2,
}  # fmt: skip


@pytest.mark.parametrize("mode", ["u-shape", "sage"])
def test_killed_and_resumed_is_the_undisturbed_run(mode: str, tmp_path: Path) -> None:
    ends = []
    for kind in ("calm", "killed"):
        config = configured(tmp_path / kind, mode, **LOSSY)
        if kind == "killed":
            with pytest.raises(Killed):
                run(config, federation(tmp_path / kind, 1, dying(2)))
            assert not cloud_processes()
        ends.append(run(config, federation(tmp_path / kind, 1)))
    assert equal(*ends)


@contextmanager
def killing(config: SplitConfig, round: int, step: int) -> Iterator[list[int]]:
    """Kill -9 the cloud's process once, when it has taken a step of a round."""
    killed: list[int] = []
    over = threading.Event()
    folder = Path(config.run_dir) / config.run_name / "cloud" / "rounds"

    def watch() -> None:
        seen: list[str] = []
        while not over.is_set() and not killed:
            for path in sorted(folder.glob("*")):
                if path.name not in seen:
                    seen.append(path.name)
            if len(seen) >= round and (folder / seen[round - 1] / f"step-{step:06d}").exists():
                for process in cloud_processes():
                    process.kill()
                    killed.append(process.pid)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield killed
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize("mode", ["u-shape", "sfl-v1"])
def test_a_dead_cloud_process_is_started_again_and_the_round_goes_on(
    mode: str, tmp_path: Path
) -> None:
    calm = run(configured(tmp_path / "calm", mode, **LOSSY), federation(tmp_path / "calm", 1))
    config = configured(tmp_path / "killed", mode, **LOSSY)
    with killing(config, 2, 4) as killed:
        end = run(config, federation(tmp_path / "killed", 1))
    assert len(killed) == 1 and equal(end, calm)


def test_a_cloud_process_that_dies_again_and_again_ends_the_run(tmp_path: Path) -> None:
    short = {"stream-deadline": 3.0, "max-retries": 0, "deadline": 40.0}
    config = configured(tmp_path, "vanilla", **short, **{"inner-steps": 400})
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            if (Path(config.run_dir) / config.run_name / "cloud" / "begin.safetensors").exists():
                for process in cloud_processes():
                    process.kill()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        with pytest.raises(RoundError, match=r"died 5 times in a round .*see .*cloud\.log"):
            run(config, federation(tmp_path, 1))
    finally:
        over.set()
        thread.join()
    assert not cloud_processes()


def test_what_cannot_be_cut_or_bound_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="leave none of the model's 2 "):
        run(configured(tmp_path, "vanilla", **{"cut-bottom": 2}), federation(tmp_path, 1))
    config = configured(tmp_path / "b", **{"stream-bind": "203.0.113.1"})
    with pytest.raises(RoundError, match=r"cannot listen on 203\.0\.113\.1"):
        run(config, federation(tmp_path, 1))
    assert not cloud_processes()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mode": "vanilla", "cut-top": 1}, "mode='vanilla' does not go with cut-top=1"),
        ({"cut-top": 0}, "mode='u-shape' does not go with cut-top=0"),
        ({"aggregation": "stack"}, "aggregation='stack' does not go with split learning"),
        ({"quantise": "int8"}, "quantise='int8' does not go with split learning"),
        ({"stream-key": "k.pem"}, "stream-certificate and stream-key go together"),
    ],
)
def test_what_does_not_go_together_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(SplitConfig, values)
