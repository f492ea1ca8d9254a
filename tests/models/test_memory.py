from __future__ import annotations

import pytest

from flower_geo.errors import ModelError
from flower_geo.models import memory_estimate, parameter_count

GIB = 1024**3


def test_estimates_grow_with_what_needs_memory() -> None:
    base = memory_estimate("gpt2-small", None, 256, 4)
    assert base.parameters == parameter_count("gpt2-small")
    longer, wider = (
        memory_estimate("gpt2-small", None, 512, 4),
        memory_estimate("gpt2-small", None, 256, 8),
    )
    assert longer.site == wider.site > base.site
    assert longer.server == base.server
    larger = memory_estimate("gpt2-medium", None, 256, 4)
    assert larger.site > base.site and larger.server > base.server


def test_estimates_are_of_the_right_size() -> None:
    nano = memory_estimate("gpt2-nano", 4096, 128, 8)
    # 510 MB were measured for the process
    assert 0.4 * GIB < nano.site < 0.8 * GIB
    # weights, gradients and AdamW's moments alone are 16 bytes a parameter
    large = memory_estimate("llama3-1b", None, 128, 1)
    assert 16 * large.parameters < large.site < 64 * large.parameters
    assert 8 * large.parameters < large.server < 48 * large.parameters


def test_unknown_models_are_refused() -> None:
    with pytest.raises(ModelError, match="did you mean 'gpt2-nano'"):
        memory_estimate("gpt2-nanoo", None, 128, 8)
