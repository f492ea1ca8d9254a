from __future__ import annotations

import os
import tomllib
from pathlib import Path

import pytest

from flower_geo.errors import ConfigError
from flower_geo.launch.connections import (
    Connection,
    add_connection,
    check_file,
    find_connection,
    remove_connection,
)

USERS = """\
# my connections
[superlink]
default = "campus"   # the big one

[superlink.campus]
address = "superlink.campus.example:443"
root-certificates = "/etc/ssl/campus.pem"

[superlink.local]
address = ":local:"
"""


def _write(home: Path, text: str) -> Path:
    file = home / "config.toml"
    file.write_text(text)
    return file


def test_a_connection_is_added_and_removed_and_the_rest_stays_as_written(tmp_path: Path) -> None:
    file = _write(tmp_path, USERS)
    file.chmod(0o600)
    add_connection(tmp_path, "geo", "127.0.0.1:4000")
    text = file.read_text()
    assert text.startswith(USERS)
    assert tomllib.loads(text)["superlink"]["geo"] == {
        "address": "127.0.0.1:4000",
        "insecure": True,
    }
    assert file.stat().st_mode & 0o777 == 0o600
    assert remove_connection(tmp_path, "geo", "127.0.0.1:4000")
    assert file.read_text() == USERS
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_a_missing_file_is_made_as_flower_would(tmp_path: Path) -> None:
    home = tmp_path / "new"
    add_connection(home, "geo", "127.0.0.1:4000")
    remove_connection(home, "geo", "127.0.0.1:4000")
    assert tomllib.loads((home / "config.toml").read_text()) == {
        "superlink": {"default": "local", "local": {"address": ":local:"}}
    }


def test_a_table_that_flower_rewrote_is_still_removed(tmp_path: Path) -> None:
    before = '[superlink]\ndefault = "a"\n\n[superlink.a]\naddress = "h:1"\n'
    ours = '\n[superlink."geo"]\ninsecure = true\naddress = "127.0.0.1:4000"\n'
    after = "\n[other]\nvalue = [\n  1,\n]\n"
    file = _write(tmp_path, before + ours + after)
    assert remove_connection(tmp_path, "geo", "127.0.0.1:4000")
    assert tomllib.loads(file.read_text()) == tomllib.loads(before + after)


def test_a_connection_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    file = _write(tmp_path, USERS)
    with pytest.raises(ConfigError, match=r"already has a connection 'campus'.*--name"):
        add_connection(tmp_path, "campus", "127.0.0.1:4000")
    assert not remove_connection(tmp_path, "campus", "127.0.0.1:4000")
    assert not remove_connection(tmp_path, "nobody", "127.0.0.1:4000")
    assert file.read_text() == USERS


def test_a_file_that_cannot_be_edited_safely_is_left_alone(tmp_path: Path) -> None:
    text = 'superlink = { default = "a", a = { address = "h:1" } }\n'
    file = _write(tmp_path, text)
    with pytest.raises(ConfigError, match="by hand"):
        add_connection(tmp_path, "geo", "127.0.0.1:4000")
    assert file.read_text() == text
    text = 'superlink = { geo = { address = "127.0.0.1:1" } }\n'
    _write(tmp_path, text)
    with pytest.raises(ConfigError, match="by hand"):
        remove_connection(tmp_path, "geo", "127.0.0.1:1")
    assert file.read_text() == text


def test_broken_toml_is_named(tmp_path: Path) -> None:
    _write(tmp_path, "[superlink\n")
    with pytest.raises(ConfigError, match=r"config\.toml is not valid TOML"):
        check_file(tmp_path)
    with pytest.raises(ConfigError, match="not valid TOML"):
        add_connection(tmp_path, "geo", "127.0.0.1:1")


def test_a_linked_file_stays_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles"
    real.mkdir()
    _write(real, USERS)
    home = tmp_path / "home"
    home.mkdir()
    os.symlink(real / "config.toml", home / "config.toml")
    add_connection(home, "geo", "127.0.0.1:4000")
    assert (home / "config.toml").is_symlink()
    assert "geo" in (real / "config.toml").read_text()


def test_connections_are_found_by_name(tmp_path: Path) -> None:
    _write(tmp_path, USERS + "\n[superlink.old]\noptions.num-supernodes = 4\n")
    assert find_connection(tmp_path, "campus") == Connection(
        "campus", "superlink.campus.example:443"
    )
    assert find_connection(tmp_path, "local").simulated
    assert find_connection(tmp_path, "old").simulated
    with pytest.raises(ConfigError, match=r"no connection 'camps'.*campus, local, old"):
        find_connection(tmp_path, "camps")


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:80", True),
        ("127.8.8.8:80", True),
        ("[::1]:80", True),
        ("localhost:80", True),
        ("10.0.0.1:80", False),
        ("superlink.example:443", False),
        ("localhost.example:443", False),
    ],
)
def test_what_is_on_this_machine(address: str, here: bool) -> None:
    assert Connection("x", address).on_this_machine is here
