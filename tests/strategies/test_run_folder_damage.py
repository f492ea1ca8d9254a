"""A run folder that was cut, flipped or edited: it heals, or one line says what is wrong."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from flower_geo.config import DiLoCoConfig
from flower_geo.errors import CheckpointCorrupt, FlowerGeoError, ResumeMismatch, StateError
from flower_geo.observe import read_metrics
from flower_geo.resilience import Spool
from flower_geo.strategies import DiLoCo, initial_arrays
from flower_geo.strategies.session import RunSession
from tests.federation import MemoryGrid
from tests.strategies.runs import Killed, configured, equal, federation, run

#: Files of a run that was killed within its third round, by what each is.
FILES = {
    "config": "config.json",
    "journal": "journal.jsonl",
    "metrics": "metrics.jsonl",
    "state": "checkpoints/round-000002/state.json",
    "master": "checkpoints/round-000002/master.safetensors",
    "outer": "checkpoints/round-000002/outer.safetensors",
    "older state": "checkpoints/round-000001/state.json",
    "reply": "spool/round-000003/site-0/reply.json",
    "blobs": "spool/round-000003/site-0/blobs.safetensors",
    "pid": "server.pid",
    "lock": "lock",
}


class Template:
    """A federation whose server was killed in round 3, with one reply spooled."""

    def __init__(self, root: Path) -> None:
        self.root = root
        config = configured(root)
        put, count = Spool.put, [0]

        def killed(spool: Spool, round: int, meta: Any, blobs: Any) -> Any:
            count[0] += 1
            if count[0] == 6:
                raise Killed
            return put(spool, round, meta, blobs)

        with pytest.MonkeyPatch.context() as patched, pytest.raises(Killed):
            patched.setattr(Spool, "put", killed)
            run(config, federation(root, 2))
        (root / "runs/diloco/server.pid").write_text("12345\n")  # kill -9 leaves it
        self.arrays = initial_arrays(config)

    def copy(self, to: Path) -> tuple[DiLoCoConfig, Path]:
        shutil.copytree(self.root, to, dirs_exist_ok=True)
        return configured(to), to / "runs/diloco"

    def opened(self, config: DiLoCoConfig) -> tuple[int, list[str]]:
        """What a new life of the server finds: commits, and sites with a reply on disk."""
        strategy = DiLoCo(config)
        with RunSession.open(config, strategy.terms(), MemoryGrid([])) as session:
            session.restore(self.arrays, strategy.load_outer_state, strategy.outer_state)
            found = [reply.meta.site for reply in session.folder.spool.replies(session.done + 1)]
            return session.done, found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return Template(tmp_path_factory.mktemp("killed"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return run(configured(folder), federation(folder, 2))


def damaged(data: bytes, how: str, rng: random.Random) -> bytes:
    at = rng.randrange(max(len(data) - 1, 1))
    if how == "cut":
        return data[:at]
    if how == "bit":
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if how == "noise":
        return rng.randbytes(len(data) // 2 + 1)
    return {"empty": b"", "list": b"[1, 2]\n", "deep": b"[" * 50_000 + b"\n"}[how]


def test_the_template_is_what_it_says(template: Template, tmp_path: Path) -> None:
    config, folder = template.copy(tmp_path)
    assert all((folder / name).is_file() for name in FILES.values())
    assert template.opened(config) == (2, ["site-0"])


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("how", ["cut", "bit", "noise", "empty", "list", "deep"])
def test_any_file_damaged_in_any_way(
    template: Template, tmp_path: Path, what: str, how: str
) -> None:
    rng = random.Random(f"{what}/{how}")
    for trial in range(4 if how in ("cut", "bit") else 1):
        config, folder = template.copy(tmp_path / str(trial))
        file = folder / FILES[what]
        file.write_bytes(damaged(file.read_bytes(), how, rng))
        try:
            done, spooled = template.opened(config)
        except FlowerGeoError as error:
            text = str(error)
            assert (
                "\n" not in text and len(text) < 600 and FILES[what].rsplit("/")[-1] in text
            ) or (isinstance(error, ResumeMismatch)), text
            assert what in ("config", "journal")
            continue
        # It healed: the newest checkpoint that is whole, and only replies that are.
        newest = 1 if what in ("state", "master", "outer") else 2
        assert done == newest
        assert spooled == ([] if what in ("reply", "blobs") or newest == 1 else ["site-0"])
        assert read_metrics(folder / "metrics.jsonl")[-1]["event"] == "start"


@pytest.mark.parametrize("what", ["master", "blobs", "metrics", "pid"])
def test_a_healed_run_ends_as_the_undisturbed_one(
    template: Template, tmp_path: Path, undisturbed: dict[str, Tensor], what: str
) -> None:
    config, folder = template.copy(tmp_path)
    file = folder / FILES[what]
    file.write_bytes(damaged(file.read_bytes(), "bit", random.Random(what)))
    assert equal(run(config, federation(tmp_path, 2)), undisturbed)


@pytest.mark.parametrize("what", sorted(FILES))
def test_a_folder_where_a_file_should_be(template: Template, tmp_path: Path, what: str) -> None:
    config, folder = template.copy(tmp_path)
    (folder / FILES[what]).unlink()
    (folder / FILES[what]).mkdir()
    try:
        done, _ = template.opened(config)
    except StateError as error:
        assert "\n" not in str(error) and str(folder) in str(error)
    else:
        assert done == (1 if what in ("state", "master", "outer") else 2)


def test_no_checkpoint_left_but_commits_in_the_journal(template: Template, tmp_path: Path) -> None:
    config, folder = template.copy(tmp_path)
    for state in folder.glob("checkpoints/*/state.json"):
        state.write_text("{}")
    with pytest.raises(CheckpointCorrupt, match="committed 2 rounds but none"):
        template.opened(config)


def test_a_checkpoint_of_another_version_is_named(
    template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = template.copy(tmp_path)

    def other(self: Any, state: Any) -> None:
        raise TypeError("unexpected keyword argument 'mood'")

    monkeypatch.setattr("flower_geo.resilience.Membership.restore", other)
    with pytest.raises(CheckpointCorrupt, match=r"round 2 .*another version of flower-geo"):
        template.opened(config)
