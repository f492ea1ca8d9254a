from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from flower_geo.config import DiLoCoConfig, kebab
from flower_geo.errors import ConfigError
from flower_geo.launch.options import (
    NODE_KEYS,
    by_site,
    check_node_keys,
    key_table,
    variables,
)


def test_site_configs_are_gathered_by_number() -> None:
    assert by_site(["0:data=a.txt x=1", "2:data='b c'", "0:y=true"]) == {
        0: {"data": "a.txt", "x": 1, "y": True},
        2: {"data": "b c"},
    }


@pytest.mark.parametrize("text", ["data=a.txt", "one:data=a", "-1:data=a", "0:data"])
def test_a_site_config_without_a_site_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        by_site([text])


def test_variables() -> None:
    assert variables(["A=b=c", "D="]) == {"A": "b=c", "D": ""}
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        variables(["A"])


def test_all_keys_are_listed() -> None:
    out = StringIO()
    Console(file=out, width=200).print(key_table(DiLoCoConfig))
    text = out.getvalue()
    assert not [name for name in DiLoCoConfig.model_fields if kebab(name) not in text]
    assert "adamw | sgd" in text and "integer ≥ 1, ≤ 1000000" in text


def test_a_slip_of_a_node_key_is_refused_and_other_apps_keys_pass() -> None:
    assert set(DiLoCoConfig.site_keys) <= set(NODE_KEYS)
    check_node_keys([*NODE_KEYS, "learning-rate-of-another-app"])
    with pytest.raises(ConfigError, match="'dta' is not known, did you mean 'data'"):
        check_node_keys(["dta"])
