"""Where arithmetic runs, and in what number format."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn

__all__ = ["Precision", "autocast", "device_of", "uses_bf16"]

Precision = Literal["auto", "fp32", "bf16"]


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's first parameter."""
    return next(model.parameters()).device


def uses_bf16(precision: Precision, device: torch.device) -> bool:
    """Whether matrix products run in bf16: asked for, or ``auto`` on hardware that gains."""
    if precision == "auto":
        return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return precision == "bf16"


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """The context forward passes run in."""
    if uses_bf16(precision, device):
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()
