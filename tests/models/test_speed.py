from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flower_geo.errors import ModelError
from flower_geo.models.speed import layer_speed
from tests.models.split_models import FAMILIES, small_model


@pytest.mark.parametrize("family", FAMILIES)
def test_one_layer_of_every_family_is_timed(family: str, tmp_path: Path) -> None:
    small_model(family).save_pretrained(tmp_path)
    before = torch.random.get_rng_state()
    assert 1e5 < layer_speed(str(tmp_path), 8, 2, seconds=0.01) < 1e14
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_large_model_is_timed_without_its_weights() -> None:
    assert layer_speed("gpt2-medium", 16, 1, seconds=0.01) > 1e7


def test_too_long_a_text_and_no_model_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no named model"):
        layer_speed("gpt2-pica", 8, 2, seconds=0.01)
