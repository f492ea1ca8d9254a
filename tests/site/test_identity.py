"""Who a site is and where it keeps its state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flower_geo.errors import ConfigError
from flower_geo.site.identity import cache_folder, node_number, site_name, state_folder


@pytest.mark.parametrize(
    ("node", "name"),
    [({"site": "north-1.b"}, "north-1.b"), ({"site": "a", "partition-id": 3}, "a"),
     ({"site": 7}, "7"), ({"partition-id": 0}, "site-0"), ({"partition-id": "12"}, "site-12"),
     ({"partition-id": 2.0}, "site-2")],
)  # fmt: skip
def test_a_sites_name(node: dict[str, Any], name: str) -> None:
    assert site_name(node) == name


@pytest.mark.parametrize(
    "node",
    [{"site": ""}, {"site": "../x"}, {"site": "a/b"}, {"site": ".x"}, {"site": "a b"},
     {"site": "x" * 65}, {"site": "a\n"}, {"partition-id": "x"}, {"partition-id": -1},
     {"partition-id": 1.5}, {"partition-id": True}, {"partition-id": float("nan")},
     {"partition-id": float("inf")}, {"partition-id": 10**80}, {"partition-id": 10**400},
     {"partition-id": ""}, {"partition-id": None}],
)  # fmt: skip
def test_names_that_are_none(node: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        site_name(node)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_a_site_without_a_name_is_told_how_to_get_one() -> None:
    with pytest.raises(ConfigError, match=r"--node-config 'site="):
        site_name({"data": "x"})


def test_numbers_have_a_default() -> None:
    assert node_number({}, "num-partitions", 4) == 4
    with pytest.raises(ConfigError, match="node-config num-partitions='many'"):
        node_number({"num-partitions": "many"}, "num-partitions", 4)


@pytest.mark.parametrize(
    ("folder", "key", "variable", "xdg", "last"),
    [(state_folder, "state-dir", "FLOWER_GEO_STATE_DIR", "XDG_STATE_HOME", "flower-geo/sites"),
     (cache_folder, "cache-dir", "FLOWER_GEO_CACHE_DIR", "XDG_CACHE_HOME", "flower-geo")],
)  # fmt: skip
def test_folders_in_order_of_who_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: Any, key: str, variable: str,
    xdg: str, last: str,
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(xdg, str(tmp_path / "xdg"))
    monkeypatch.setenv(variable, str(tmp_path / "variable"))
    assert folder({key: str(tmp_path / "node")}) == tmp_path / "node"
    assert folder({key: "~/mine"}) == tmp_path / "home" / "mine"
    assert folder({key: ""}) == folder({}) == tmp_path / "variable"
    monkeypatch.setenv(variable, "")
    assert folder({}) == tmp_path / "xdg" / last
    monkeypatch.delenv(xdg)
    assert folder({}).is_relative_to(tmp_path / "home")
    monkeypatch.chdir(tmp_path)
    assert folder({key: "relative"}) == tmp_path / "relative"
