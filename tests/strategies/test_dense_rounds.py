"""Rounds that begin dense, go on sparse and end dense, and the decay of what broadcasts lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.compression import Broadcaster, codec
from flower_geo.config import load_app
from flower_geo.errors import CodecSpecError
from flower_geo.strategies import DiLoCo
from flower_geo.strategies.links import check_codecs
from tests.strategies.runs import Killed, configured, dying, equal, events, federation, run

SPARSE = "topk(density=0.1,chunk=4096)|int2(block=64)"
VALUES: dict[str, Any] = {
    "codec-up": SPARSE, "codec-down": SPARSE, "dense-rounds": 2, "dense-codec": "int8(block=256)",
    "downlink-decay": 0.9, "feedback-decay": 0.95, "rounds": 4,
}  # fmt: skip
APP = Path(__file__).resolve().parents[2] / "apps" / "diloco"


def test_the_first_rounds_are_dense_both_ways(tmp_path: Path) -> None:
    config = configured(tmp_path, **VALUES)
    run(config, federation(tmp_path, 2))
    ups = {e["round"]: e["codec_up"] for e in events(config, "site") if e["status"] == "accepted"}
    assert ups == {1: "int8(block=256)", 2: "int8(block=256)", 3: SPARSE, 4: SPARSE}
    down = {e["round"]: e["bytes_down"] for e in events(config, "round")}
    # The first round sends nothing; what follows a round is coded as the round was.
    assert down[1] == 0 and down[2] == down[3] > 4 * down[4] > 0


def test_the_last_rounds_are_dense_both_ways(tmp_path: Path) -> None:
    config = configured(tmp_path, **VALUES, **{"dense-last-rounds": 1})
    run(config, federation(tmp_path, 2))
    ups = {e["round"]: e["codec_up"] for e in events(config, "site") if e["status"] == "accepted"}
    assert ups == {1: "int8(block=256)", 2: "int8(block=256)", 3: SPARSE, 4: "int8(block=256)"}


@pytest.mark.parametrize("when", [3, 5, 8])
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path: Path, when: int) -> None:
    config = configured(tmp_path / "whole", **VALUES)
    whole = run(config, federation(tmp_path / "whole", 2))
    config = configured(tmp_path / "killed", **VALUES)
    with pytest.raises(Killed):
        run(config, federation(tmp_path / "killed", 2, dying(when)))
    assert equal(run(config, federation(tmp_path / "killed", 2)), whole)


def test_a_decay_keeps_that_share_of_what_coding_lost() -> None:
    start = {"w": torch.zeros(256)}
    sender = Broadcaster(codec("topk(density=0.1,chunk=256)"), start)
    sender.advance({"w": torch.randn(256, generator=torch.Generator().manual_seed(0))})
    lost = sender.master["w"] - sender.shadow["w"]
    assert sender.carried(1.0) is sender.master
    assert torch.equal(sender.carried(0.0)["w"], sender.shadow["w"])
    torch.testing.assert_close(sender.carried(0.9)["w"], sender.shadow["w"] + 0.9 * lost)


def test_a_wrong_dense_codec_ends_at_once(tmp_path: Path) -> None:
    with pytest.raises(CodecSpecError, match=r"run-config dense-codec: .*int5"):
        check_codecs(configured(tmp_path, **{**VALUES, "dense-codec": "int5"}))


@pytest.mark.parametrize("preset", sorted((APP / "presets").glob("*.toml")), ids=lambda p: p.stem)
def test_a_preset_is_a_whole_configuration(preset: Path) -> None:
    settings = load_app(APP, [str(preset), "rounds=5"])
    assert settings.config.rounds == 5
    assert settings.overrides["codec-up"] == settings.config.codec_up
    DiLoCo(settings.config)  # type: ignore[arg-type]
