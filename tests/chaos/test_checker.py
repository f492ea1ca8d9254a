"""The checker passes a good run and sees each promise broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flower_geo.durable import read_sealed, write_sealed
from flower_geo.resilience import Journal, Spool
from tests.chaos.checker import check_run
from tests.strategies.runs import configured, federation, run


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ``runs/diloco`` and ``kept`` of a run of three rounds and two sites."""
    folder = tmp_path_factory.mktemp("played")
    clear = Spool.clear

    def keeping(self: Spool, up_to: int) -> None:
        for reply in self.replies(up_to):
            shutil.copytree(reply.folder, folder / "kept" / f"{reply.meta.payload_hash}-0")
        clear(self, up_to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spool, "clear", keeping)
        run(configured(folder), federation(folder, 2))
    return folder


@pytest.fixture
def copy(played: Path, tmp_path: Path) -> Path:
    for name in ("runs", "kept"):
        shutil.copytree(played / name, tmp_path / name)
    return tmp_path


def _problems(folder: Path, seen: bytes = b"") -> list[str]:
    return check_run(folder / "runs" / "diloco", folder / "kept", seen).problems


def test_a_good_run_passes(played: Path) -> None:
    found = check_run(played / "runs" / "diloco", played / "kept", b"")
    assert found.problems == [] and (found.replayed, found.repeated) == (3, 0)


def _drop_line(folder: Path) -> None:
    path = folder / "runs" / "diloco" / "journal.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))


def _repeat_round(folder: Path) -> None:
    journal = Journal(folder / "runs" / "diloco" / "journal.jsonl")
    journal.append({k: v for k, v in journal.entries()[-1].items() if k != "this"})


def _lose_reply(folder: Path) -> None:
    shutil.rmtree(next((folder / "kept").iterdir()))


def _flip_reply(folder: Path) -> None:
    """The payload of one reply is exchanged for that of another site."""
    one, other = sorted((folder / "kept").iterdir())[:2]
    shutil.copy(one / "blobs.safetensors", other / "blobs.safetensors")


def _count_twice(folder: Path) -> None:
    for place in sorted((folder / "kept").iterdir()):
        stored = read_sealed(place / "reply.json")
        if stored["meta"]["round"] == 2:
            stored["meta"]["metrics"]["consumed"] -= stored["meta"]["metrics"]["examples"]
            write_sealed(place / "reply.json", stored)


def _flip_model(folder: Path) -> None:
    path = folder / "runs" / "diloco" / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def _unfinished(folder: Path) -> None:
    path = folder / "runs" / "diloco" / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if json.loads(line)["event"] != "end"))


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_drop_line, "breaks the hash chain"), (_repeat_round, "stand twice"),
        (_lose_reply, "was not kept"), (_flip_reply, "replay of round"),
        (_count_twice, "its cursor stands at"), (_flip_model, "exported model"),
        (_unfinished, "do not end"),
    ],
)  # fmt: skip
def test_a_broken_promise_is_seen(copy: Path, spoil: Callable[[Path], None], word: str) -> None:
    spoil(copy)
    assert any(word in problem for problem in _problems(copy)), _problems(copy)


def test_a_journal_that_lost_what_was_seen_is_caught(copy: Path) -> None:
    assert any("seen during the run" in problem for problem in _problems(copy, b"{}\n"))
