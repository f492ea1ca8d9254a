"""The hash-chained journal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flower_geo.errors import StateError
from flower_geo.resilience.journal import Journal


def filled(path: Path, count: int = 5) -> list[str]:
    journal = Journal(path)
    for round in range(1, count + 1):
        journal.append({"what": "commit", "round": round, "hash": f"h{round}"})
    return path.read_text().splitlines()


def test_entries_come_back_in_order(tmp_path: Path) -> None:
    filled(tmp_path / "j")
    journal = Journal(tmp_path / "j")
    assert [entry["round"] for entry in journal.entries()] == [1, 2, 3, 4, 5]
    assert journal.last_round() == 5


@pytest.mark.parametrize("damage", ["changed", "removed", "inserted", "swapped"])
def test_a_touched_line_is_named(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "j"
    lines = filled(path)
    if damage == "changed":
        entry = json.loads(lines[2])
        lines[2] = json.dumps({**entry, "hash": "other"}, sort_keys=True)
    elif damage == "removed":
        del lines[2]
    elif damage == "inserted":
        lines.insert(2, lines[1])
    else:
        lines[2], lines[3] = lines[3], lines[2]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(StateError, match="line 3"):
        Journal(path).entries()


def test_a_torn_last_line_is_cut_and_the_chain_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"what": "com')
    assert Journal(path).last_round() == 3
    Journal(path).append({"what": "commit", "round": 4, "hash": "h4"})
    assert [entry["round"] for entry in Journal(path).entries()] == [1, 2, 3, 4]
