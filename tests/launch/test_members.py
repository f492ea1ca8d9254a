from __future__ import annotations

from pathlib import Path

import pytest
from flwr.common.config import parse_config_args
from hypothesis import assume, given
from hypothesis import strategies as st

from flower_geo.errors import ConfigError, StateError
from flower_geo.launch.members import Member, node_config_text

VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**62), 2**62),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"])),
)


@given(st.dictionaries(st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True), VALUES, min_size=1))
def test_flower_reads_the_node_config_as_it_was_meant(values: dict[str, object]) -> None:
    try:
        text = node_config_text(values)
    except ConfigError:
        assume(False)
    assert parse_config_args([text]) == values


@pytest.mark.parametrize("value", ["two\nlines", "'\"", "it's a back\\slash"])
def test_a_value_that_cannot_be_passed_on_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="node-config data="):
        node_config_text({"data": value})


def test_the_node_id_is_that_of_the_newest_start(tmp_path: Path) -> None:
    log = tmp_path / "log"
    member = Member("supernode", "site-0", tmp_path, log, "mark")
    assert member.node_id == ""
    first = "INFO :      SuperNode ID: 17\n"
    log.write_text(first)
    assert member.node_id == "17"
    member.log_offset = len(first)
    assert member.node_id == ""
    log.write_text(first + "INFO :      SuperNode ID: 18\n")
    assert member.node_id == "18"


def test_a_member_is_stored_and_read_back(tmp_path: Path) -> None:
    member = Member(
        "supernode", "site-0", tmp_path, tmp_path / "log", "mark", {"A": "b"}, "127.0.0.1:1",
        {"partition-id": 0, "lr": 0.5, "flag": True}, 4000,
    )  # fmt: skip
    again = Member.from_json(member.to_json())
    assert again.to_json() == member.to_json()
    with pytest.raises(StateError, match="never started"):
        _ = again.pid
    assert not again.alive()
