from __future__ import annotations

import dataclasses

import pytest

from flower_geo.models import MODELS, build_model, parameter_count


@pytest.mark.parametrize(
    ("spec", "vocab_size", "expected"),
    [
        ("gpt2-nano", 4096, 1_350_400),
        ("llama-nano", 4096, 1_311_872),
        # published sizes
        ("gpt2-small", None, 124_439_808),
        ("gpt2-medium", None, 354_823_168),
        ("llama3-1b", None, 1_235_814_400),
    ],
)
def test_parameter_counts(spec: str, vocab_size: int | None, expected: int) -> None:
    assert parameter_count(spec, vocab_size) == expected


def test_vocabulary_counts_once_because_it_is_tied() -> None:
    assert parameter_count("llama-nano", 4097) - parameter_count("llama-nano", 4096) == 128
    assert parameter_count("gpt2-nano", 4097) - parameter_count("gpt2-nano", 4096) == 128


def test_named_models_have_no_dropout_and_no_special_tokens() -> None:
    for spec in ("gpt2-nano", "llama-nano"):
        config = build_model(spec, seed=0, vocab_size=64, max_seq_len=8).config.to_dict()
        rates = {k: v for k, v in config.items() if k.endswith(("_pdrop", "_dropout"))}
        rates.pop("summary_first_dropout", None)  # of a classification head GPT-2 lacks here
        assert rates and set(rates.values()) == {0.0}
        assert config["bos_token_id"] is config["eos_token_id"] is config["pad_token_id"] is None


def test_table_and_specs_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        MODELS["gpt2-nano"] = MODELS["gpt2-small"]  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODELS["gpt2-nano"].layers = 1  # type: ignore[misc]
