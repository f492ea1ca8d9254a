from __future__ import annotations

import pytest
import torch

from flower_geo.evaluation.precision import autocast, device_of, uses_bf16
from tests.training.conftest import small

CPU = torch.device("cpu")


def test_auto_is_exact_on_a_cpu() -> None:
    assert not uses_bf16("auto", CPU)
    assert not uses_bf16("fp32", CPU)
    assert uses_bf16("bf16", CPU)


@pytest.mark.parametrize("native", [True, False])
def test_auto_asks_a_gpu_for_native_bf16(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def supported(including_emulation: bool = True) -> bool:
        asked.append(including_emulation)
        return native

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)
    assert uses_bf16("auto", torch.device("cuda")) is native
    assert asked == [False]
    assert not uses_bf16("fp32", torch.device("cuda"))


def test_autocast_is_on_inside_only() -> None:
    with autocast("bf16", CPU):
        assert torch.is_autocast_enabled("cpu")
    with autocast("auto", CPU):
        assert not torch.is_autocast_enabled("cpu")
    assert not torch.is_autocast_enabled("cpu")


def test_device_is_the_models() -> None:
    assert device_of(small()) == CPU
