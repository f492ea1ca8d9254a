from __future__ import annotations

import math
from typing import Any

import pytest
from peft import LoraConfig

from flower_geo.errors import ModelError
from flower_geo.models import AdapterSpec, attach, build_model, spec_from_config
from flower_geo.models.adapter import lora_layers

Q0 = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("rslora", [False, True])
def test_ranks_and_scales_are_what_peft_makes_of_them(rslora: bool) -> None:
    spec = AdapterSpec(
        rank=8,
        alpha=12,
        rank_pattern={"q_proj": 3, "layers.1.mlp.up_proj": 5, r".*\.0\.mlp.*": 2},
        alpha_pattern={"self_attn.v_proj": 7.0, "q_proj": 20.0},
        rslora=rslora,
    )
    model = attach(build_model("llama-nano", seed=0, vocab_size=64), spec, 0)
    layers = lora_layers(model)
    assert len(layers) == 4 * 7
    for name, layer in layers.items():
        assert layer.r["default"] == spec.rank_of(name) == spec.rank_of(f"base_model.model.{name}")
        assert layer.scaling["default"] == spec.scale_of(name)
    assert (spec.rank_of(Q0), spec.alpha_of(Q0)) == (3, 20.0)
    assert spec.scale_of(Q0) == 20 / (math.sqrt(3) if rslora else 3)
    assert spec.rank_of("model.layers.0.mlp.down_proj") == 2


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rank": 0}, "LoRA rank is 0"),
        ({"rank": 2.0}, "LoRA rank is 2.0"),
        ({"rank": True}, "LoRA rank is True"),
        ({"rank_pattern": {"q_proj": -1}}, "rank of q_proj is -1"),
        ({"alpha": 0}, "LoRA alpha is 0"),
        ({"alpha": math.nan}, "LoRA alpha is nan"),
        ({"alpha_pattern": {"q_proj": math.inf}}, "alpha of q_proj is inf"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"target_modules": ()}, "no target modules"),
        ({"alpha_pattern": {"(": 1.0}}, "no regular expression"),
    ],
)
def test_a_value_no_adapter_can_have_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as error:
        AdapterSpec(**values)
    assert "\n" not in str(error.value)


def test_a_peft_config_becomes_the_spec_that_equals_it() -> None:
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        lora_dropout=0.1,
        target_modules=["v_proj", "q_proj"],
        rank_pattern={"q_proj": 2},
        alpha_pattern={"q_proj": 3},
        use_rslora=True,
        modules_to_save=["norm"],
        task_type="CAUSAL_LM",
    )
    assert spec_from_config(config) == AdapterSpec(
        4, 6, 0.1, ("q_proj", "v_proj"), {"q_proj": 2}, {"q_proj": 3}, True, ("norm",)
    )
    assert spec_from_config(LoraConfig(target_modules="all-linear")).target_modules == "auto"


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"use_dora": True}, "magnitude.*not linear.*no rule"),
        ({"bias": "lora_only"}, "with bias cannot be aggregated"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, "layers_pattern"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"lora_bias": True}, "lora_bias"),
    ],
)
def test_what_no_rule_can_average_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said) as error:
        spec_from_config(LoraConfig(target_modules=["q_proj"], **values))
    assert "\n" not in str(error.value)
