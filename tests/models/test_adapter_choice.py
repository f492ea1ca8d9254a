"""From a configuration to an adapter's shape."""

from __future__ import annotations

import pytest

from flower_geo.config import FedAvgLoRAConfig, parse
from flower_geo.data import load_tokenizer
from flower_geo.errors import ConfigError
from flower_geo.models import AdapterSpec
from flower_geo.models.adapter_choice import adapter_spec, adapter_tokenizer, site_spec


def spec_of(**values: object) -> AdapterSpec:
    return adapter_spec(
        parse(FedAvgLoRAConfig, {k.replace("_", "-"): v for k, v in values.items()})
    )


def test_the_keys_are_the_adapters() -> None:
    spec = spec_of(
        rank=8, alpha=4.0, rslora=True, dropout=0.1, target_modules="q_proj, v_proj",
        rank_pattern="q_proj=4", alpha_pattern="v_proj=2.5", modules_to_save="lm_head",
    )  # fmt: skip
    assert spec.target_modules == ("q_proj", "v_proj") and spec.modules_to_save == ("lm_head",)
    assert (spec.rank_of("layers.0.q_proj"), spec.rank_of("layers.0.v_proj")) == (4, 8)
    assert spec.scale_of("layers.0.q_proj") == 4.0 / 2.0
    assert spec.scale_of("layers.0.v_proj") == 2.5 / 8**0.5
    assert spec_of().target_modules == "auto"


def test_a_sites_own_rank_and_alpha() -> None:
    whole = spec_of(rank=16, alpha=32.0, rank_pattern="q_proj=4,k_proj=12")
    mine = site_spec(whole, 8, None)
    assert [mine.rank_of(name) for name in ("q_proj", "k_proj", "v_proj")] == [4, 8, 8]
    assert mine.scale_of("v_proj") == 4.0 and site_spec(whole, 8, 8.0).scale_of("v_proj") == 1.0
    assert site_spec(whole, None, None) is whole
    with pytest.raises(ConfigError, match="rank=17 is higher than the run's rank=16"):
        site_spec(whole, 17, None)


def test_the_tokenizer_of_a_name() -> None:
    assert len(adapter_tokenizer("llama-nano", "builtin", load_tokenizer)) == 4096
    assert adapter_tokenizer("some-folder", "model", str.upper) == "SOME-FOLDER"
