"""A SuperNode that comes after a dead one says so, and no other does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_geo.site import forerunner as module
from flower_geo.site.forerunner import forerunner
from flower_geo.site.place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "run" / "site")


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a SuperNode."""
    process = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=-1)
    yield process
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()


def test_the_first_follows_nobody_however_often_it_is_asked(place: Place) -> None:
    assert [forerunner(place, 1) for _ in range(3)] == ["", "", ""]
    assert (place.folder / "supernode.json").stat().st_mode & 0o077 == 0


def test_after_a_dead_one_it_is_named_again_and_again(
    place: Place, other: subprocess.Popen[bytes]
) -> None:
    assert forerunner(place, 2**63 + 1, other.pid) == ""
    other.kill()
    # Not waited for: a zombie is dead.
    while forerunner(place, 2) == "":
        pass
    assert [forerunner(place, 2), forerunner(place, 2)] == [str(2**63 + 1)] * 2


def test_while_the_other_lives_nothing_is_claimed_or_written(
    place: Place, other: subprocess.Popen[bytes]
) -> None:
    forerunner(place, 1, other.pid)
    assert [forerunner(place, 2), forerunner(place, 2)] == ["", ""]
    assert forerunner(place, 1, other.pid) == ""
    assert json.loads((place.folder / "supernode.json").read_bytes())["node"] == "1"


def test_a_pid_given_to_another_process_is_not_the_old_one(
    place: Place, other: subprocess.Popen[bytes]
) -> None:
    forerunner(place, 1, other.pid)
    path = place.folder / "supernode.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"started": 1.0}))
    assert forerunner(place, 2) == "1"


def test_of_another_machine_nothing_is_known(
    place: Place, other: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    forerunner(place, 1, other.pid)
    other.kill()
    other.wait()
    monkeypatch.setattr(module, "_host", lambda: "elsewhere")
    assert forerunner(place, 2) == ""


@pytest.mark.parametrize("text", ["", "{", "[]", '{"node": "1"}', '{"node": 1, "before": ""}'])
def test_what_cannot_be_read_counts_as_nothing(place: Place, text: str) -> None:
    place.make()
    (place.folder / "supernode.json").write_text(text)
    assert [forerunner(place, 3), forerunner(place, 3)] == ["", ""]


def test_a_folder_that_cannot_be_made_is_no_error_here(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert forerunner(Place(tmp_path / "file" / "site"), 1) == ""
