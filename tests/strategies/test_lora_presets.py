"""The presets of apps/fedavg_lora."""

from __future__ import annotations

from pathlib import Path

import pytest

from flower_geo.config import load_app
from flower_geo.strategies import FedAvgLoRA
from flower_geo.strategies.links import check_codecs

APP = Path(__file__).resolve().parents[2] / "apps" / "fedavg_lora"
NAMES = ("safe", "lean", "extreme")


def test_those_of_diloco_are_there() -> None:
    there = {path.stem for path in (APP / "presets").glob("*.toml")}
    assert there == set(NAMES) == {p.stem for p in (APP / "../diloco/presets").glob("*.toml")}


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_a_whole_configuration(name: str) -> None:
    settings = load_app(APP, [str(APP / "presets" / f"{name}.toml"), "rounds=5"])
    assert settings.config.rounds == 5
    assert settings.overrides["codec-up"] == settings.config.codec_up
    check_codecs(settings.config)
    FedAvgLoRA(settings.config)  # type: ignore[arg-type]
