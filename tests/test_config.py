"""Configuration: unknown keys, bad values, overrides, and what decides a round."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_geo.config import (
    FIXED_KEYS,
    STRATEGIES,
    TRAINING_KEYS,
    CommonConfig,
    DiLoCoConfig,
    check_name,
    kebab,
    load_app,
    parse,
    parse_overrides,
)
from flower_geo.errors import ConfigError

REPO = Path(__file__).resolve().parents[1]


def test_defaults_are_valid_and_round_trip() -> None:
    config = DiLoCoConfig()
    assert parse(DiLoCoConfig, config.public()) == config


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"inner-step": 3}, "did you mean 'inner-steps'"),
        ({"rounds": 0}, "greater than or equal to 1"),
        ({"rounds": "many"}, "rounds='many'"),
        ({"rounds": 2.5}, "rounds=2.5"),
        ({"outer-momentum": 1.0}, "less than 1"),
        ({"schedule": "cosin"}, "'cosine'"),
        ({"quorum": "some"}, "quorum='some'"),
        ({"quorum": 1.5}, "quorum=1.5"),
        ({"run-name": "../up"}, "cannot name a folder"),
        ({"run-name": ""}, "cannot name a folder"),
        ({"warmup-steps": 1000}, "longer than the whole run"),
        ({"model": 3}, "model=3"),
    ],
)
def test_a_bad_value_is_named_in_one_line(values: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(DiLoCoConfig, values)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("quorum", "asked", "needed"),
    [("all", 4, 4), (3, 4, 3), (9, 4, 4), ("0.75", 4, 3), (0.5, 5, 3), (0.01, 4, 1)],
)
def test_quorum(quorum: Any, asked: int, needed: int) -> None:
    assert parse(CommonConfig, {"quorum": quorum}).quorum_of(asked) == needed


def test_overrides_are_typed_and_bare_words_are_text(tmp_path: Path) -> None:
    given = parse_overrides(['rounds=3 codec-up=fp32 inner-lr=1e-3 sample-prompt="It was"'])
    assert given == {"rounds": 3, "codec-up": "fp32", "inner-lr": 1e-3, "sample-prompt": "It was"}
    assert parse_overrides(["codec-up=int8(block=256)"]) == {"codec-up": "int8(block=256)"}
    file = tmp_path / "mine.toml"
    file.write_text("rounds = 7\n")
    assert parse_overrides([str(file), "seed=1"]) == {"rounds": 7, "seed": 1}


@pytest.mark.parametrize("piece", ["rounds", "rounds 3", "=3", "no.toml"])
def test_an_unreadable_override(piece: str) -> None:
    with pytest.raises(ConfigError):
        parse_overrides([piece])


def test_the_app_lists_every_key() -> None:
    settings = load_app(REPO / "apps" / "diloco", ["rounds=3"])
    assert settings.config.rounds == 3
    import tomllib

    table = tomllib.loads((REPO / "apps/diloco/pyproject.toml").read_text())
    listed = set(table["tool"]["flwr"]["app"]["config"])
    # Flower refuses an override of a key the app does not list.
    assert listed == set(DiLoCoConfig().public())


def test_no_app(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pyproject\.toml"):
        load_app(tmp_path)


def test_fingerprint_follows_training_keys_only() -> None:
    base = DiLoCoConfig()
    assert base.fingerprint() == base.model_copy(update={"deadline": 5.0}).fingerprint()
    assert base.fingerprint() != base.model_copy(update={"inner_lr": 5.0}).fingerprint()
    assert base.fingerprint() != base.model_copy(update={"rounds": 99}).fingerprint()


def test_key_sets_name_real_keys() -> None:
    for model in STRATEGIES.values():
        assert set(model().public()) >= model.training_keys >= TRAINING_KEYS
        assert {kebab(name) for name in model.model_fields} >= model.site_keys
    assert set().union(*(model().public() for model in STRATEGIES.values())) >= FIXED_KEYS


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "", "x" * 65, "a b", "a\n"])
def test_names_that_cannot_be_folders(name: str) -> None:
    with pytest.raises(ConfigError):
        check_name(name, "site")
