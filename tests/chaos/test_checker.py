"""The checker passes a good run and sees each promise broken."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Message

from flower_geo.durable import read_sealed, write_sealed
from flower_geo.resilience import Journal, Spool
from flower_geo.site import work
from flower_geo.site.state import Generation, SiteState
from tests.chaos.checker import Findings, check_run
from tests.federation import Tamper, sites
from tests.strategies.runs import configured, federation, run


def _play(folder: Path, tamper: Tamper | None = None, **values: Any) -> Path:
    """A folder with ``runs/diloco``, ``state`` and ``kept`` of a run of two sites."""
    clear = Spool.clear

    def keeping(self: Spool, up_to: int) -> None:
        for reply in self.replies(up_to):
            shutil.copytree(reply.folder, folder / "kept" / f"{reply.meta.payload_hash}-0")
        clear(self, up_to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spool, "clear", keeping)
        run(configured(folder, **values), federation(folder, 2, tamper))
    return folder


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _play(tmp_path_factory.mktemp("played"))


@pytest.fixture
def copy(played: Path, tmp_path: Path) -> Path:
    for name in ("runs", "kept", "state"):
        shutil.copytree(played / name, tmp_path / name)
    return tmp_path


def _check(folder: Path, seen: bytes = b"", **damage: bool) -> Findings:
    nodes = {f"site-{node.config['partition-id']}": node.config
             for node in sites(2, folder / "state")}  # fmt: skip
    return check_run(folder / "runs" / "diloco", folder / "kept", seen, nodes, **damage)


def test_a_good_run_passes(played: Path) -> None:
    found = _check(played)
    assert found.problems == []
    assert (found.replayed, found.repeated, found.retrained) == (3, 0, 6)


@pytest.mark.parametrize(
    "values",
    [
        {"codec-down": "topk(density=0.05)|int4", "downlink-decay": 0.5},
        {"codec-up": "sign", "codec-down": "sign", "dense-rounds": 2},
        {"codec-up": "fp32", "codec-down": "fp32"},
    ],
)
def test_a_good_run_of_other_settings_passes(tmp_path: Path, values: dict[str, Any]) -> None:
    found = _check(_play(tmp_path, **values))
    assert (found.problems, found.replayed, found.retrained) == ([], 3, 6)


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


def _change_residual(folder: Path, change: Callable[[Generation], None]) -> None:
    place = next((folder / "state").glob("diloco-*/site-1"))
    name, uid = place.parent.name.rsplit("-", 1)
    state = SiteState(folder / "state", name, uid, "site-1")
    generation = state.load(3)
    assert generation is not None
    change(generation)
    state.save(generation)


def _drop_residual(folder: Path) -> None:
    def drop(generation: Generation) -> None:
        generation.residual.clear()

    _change_residual(folder, drop)


def _lose_residual(folder: Path) -> None:
    """One value of it, as large as what coding lost."""

    def lose(generation: Generation) -> None:
        tensor = generation.residual["transformer.wte.weight"].view(-1)
        tensor[int(tensor.abs().argmax())] = 0.0

    _change_residual(folder, lose)


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (_drop_line, "breaks the hash chain"), (_repeat_round, "stand twice"),
        (_lose_reply, "was not kept"), (_flip_reply, "replay of round"),
        (_count_twice, "its cursor stands at"), (_flip_model, "exported model"),
        (_unfinished, "do not end"), (_drop_residual, "is not there"),
        (_lose_residual, "sum given"),
    ],
)  # fmt: skip
def test_a_broken_promise_is_seen(copy: Path, spoil: Callable[[Path], None], word: str) -> None:
    spoil(copy)
    assert any(word in problem for problem in _check(copy).problems), _check(copy).problems


def test_a_site_that_trains_otherwise_is_seen(
    played: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = work._encoded

    def twice(session: Any, base: Any, residual: Any) -> Any:
        doubled = {name: 2 * tensor for name, tensor in residual.items()}
        return encoded(session, base, doubled)

    monkeypatch.setattr(work, "_encoded", twice)
    found = _check(played)
    assert [problem.partition(":")[2] for problem in found.problems] == (
        [" round 2, trained again, gives another reply"] * 2
    )
    assert found.retrained == 2


def test_a_site_whose_state_was_damaged_may_begin_anew(tmp_path: Path) -> None:
    folder = tmp_path / "forgetful"

    def forget(site: str, message: Message, reply: Message) -> list[Message]:
        metadata = message.metadata
        if (site, metadata.message_type, metadata.group_id) == ("site-1", "train", "2"):
            shutil.rmtree(next((folder / "state").glob("diloco-*/site-1/gen-000002")))
        return [reply]

    _play(folder, forget)
    assert any("gives another reply" in problem for problem in _check(folder).problems)
    assert _check(folder, forgot=True).problems == []


def test_a_journal_that_lost_what_was_seen_is_caught(copy: Path) -> None:
    assert any("seen during the run" in problem for problem in _check(copy, b"{}\n").problems)
