"""A site's state on disk: whole or not there, kept as long as it may be asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flower_geo.errors import StateError, StateLocked
from flower_geo.site.state import KEEP_NEWER, KEEP_OLDER, Generation, SiteState


def state(tmp_path: Path, site: str = "north") -> SiteState:
    return SiteState(tmp_path, "run", "uid", site)


def generation(round: int, parent: int = 0) -> Generation:
    return Generation(
        round=round, parent=parent, key=("hash", "print"), consumed=round * 10,
        inner={"exp_avg/w": torch.full((2, 3), float(round)), "step": torch.tensor(2.0)},
        residual={"w": torch.zeros(3)}, reply={"w": torch.arange(9, dtype=torch.uint8)},
        fields={"metrics": {"tokens": 8.0, "loss": 0.1 + 0.2}, "kind": "delta", "codec": "fp32"},
    )  # fmt: skip


def same(one: Generation | None, other: Generation) -> bool:
    assert one is not None
    groups = ("inner", "residual", "reply")
    return all(
        getattr(one, key) == getattr(other, key)
        for key in ("round", "parent", "key", "consumed", "fields")
    ) and all(
        getattr(one, group).keys() == getattr(other, group).keys()
        and all(torch.equal(getattr(one, group)[k], t) for k, t in getattr(other, group).items())
        for group in groups
    )


def test_a_generation_comes_back(tmp_path: Path) -> None:
    with state(tmp_path) as site:
        site.save(generation(3, parent=2))
        site.save(Generation(round=4))
    again = state(tmp_path)
    assert same(again.load(3), generation(3, parent=2)) and same(again.load(4), Generation(4))
    assert again.load(5) is None and again.generations() == [3, 4]
    site.save(generation(3))
    assert same(again.load(3), generation(3))


def test_sites_and_runs_are_apart_and_private(tmp_path: Path) -> None:
    with state(tmp_path) as site, state(tmp_path, "south") as other:
        site.save(generation(1))
        site.save_base(0, "h", {"w": torch.ones(2)})
        assert other.generations() == [] and other.base() == (-1, "")
        assert SiteState(tmp_path, "run", "uid2", "north").generations() == []
    folder = tmp_path / "run-uid" / "north"
    paths = [folder, *folder.rglob("*")]
    assert len(paths) > 6 and all(path.stat().st_mode & 0o077 == 0 for path in paths)


FILES = ["inner.safetensors", "residual.safetensors", "reply.safetensors", "state.json"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["bit", "cut", "empty", "gone", "folder"])
def test_a_damaged_generation_is_none(tmp_path: Path, file: str, damage: str) -> None:
    site = state(tmp_path)
    site.save(generation(3))
    path = tmp_path / "run-uid" / "north" / "gen-000003" / file
    data = path.read_bytes()
    if damage == "bit":
        place = data.index(b"30") if file == "state.json" else len(data) - 1
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    elif damage == "cut":
        path.write_bytes(data[:-5])
    elif damage == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    assert site.load(3) is None
    site.save(generation(3))
    assert same(site.load(3), generation(3))


def test_a_generation_under_another_name_is_none(tmp_path: Path) -> None:
    site = state(tmp_path)
    site.save(generation(3))
    folder = tmp_path / "run-uid" / "north"
    os.rename(folder / "gen-000003", folder / "gen-000007")
    assert site.generations() == [7] and site.load(7) is None


def test_the_base_comes_back_or_is_none(tmp_path: Path) -> None:
    site = state(tmp_path)
    assert site.base() == (-1, "") and site.load_base() is None
    site.save_base(7, "hash", {"w": torch.arange(4.0)})
    found = site.load_base()
    assert site.base() == (7, "hash")
    assert found is not None and torch.equal(found["w"], torch.arange(4.0))
    folder = tmp_path / "run-uid" / "north" / "base"
    for name in ("weights.safetensors", "base.json"):
        site.save_base(7, "hash", {"w": torch.arange(4.0)})
        data = (folder / name).read_bytes()
        place = data.index(b"7") if name == "base.json" else len(data) - 2
        (folder / name).write_bytes(data[:place] + b"8" + data[place + 1 :])
        assert site.load_base() is None
    assert site.base() == (-1, "")
    site.drop_base()
    site.drop_base()
    assert not folder.exists()


# -- what is kept ---------------------------------------------------------------


def kept(tmp_path: Path, parents: dict[int, int], accepted: int) -> list[int]:
    site = state(tmp_path)
    for round, parent in parents.items():
        site.save(generation(round, parent))
    site.prune(accepted)
    return site.generations()


def test_forebears_of_the_accepted_generation_are_kept(tmp_path: Path) -> None:
    parents = {round: round - 1 for round in range(1, 9)}
    assert kept(tmp_path, parents, accepted=7) == [5, 6, 7, 8]
    assert KEEP_OLDER == 2


def test_lost_updates_do_not_push_out_what_a_coordinator_may_come_back_to(tmp_path: Path) -> None:
    """Rounds 3 to 6 were lost; a coordinator that loses round 7 goes on from round 2."""
    parents = {1: 0, 2: 1, 3: 2, 4: 2, 5: 2, 6: 2, 7: 2, 8: 7}
    assert kept(tmp_path, parents, accepted=7) == [1, 2, 7, 8]


def test_updates_that_never_count_do_not_fill_the_disk(tmp_path: Path) -> None:
    parents = {round: 0 for round in range(1, 12)}
    assert kept(tmp_path, parents, accepted=0) == list(range(12 - KEEP_NEWER, 12))
    parents = {1: 0} | {round: 1 for round in range(2, 12)}
    assert kept(tmp_path / "b", parents, accepted=1) == [1, 9, 10, 11]


def test_the_newest_is_never_removed_and_nothing_is_no_fault(tmp_path: Path) -> None:
    assert kept(tmp_path, {}, accepted=5) == []
    assert kept(tmp_path / "b", {1: 0}, accepted=0) == [1]


def test_without_the_accepted_generation_the_newest_older_ones_stay(tmp_path: Path) -> None:
    parents = {round: round - 1 for round in (1, 2, 3, 4, 9)}
    assert kept(tmp_path, parents, accepted=6) == [3, 4, 9]


def test_a_damaged_forebear_ends_the_line(tmp_path: Path) -> None:
    site = state(tmp_path)
    for round in range(1, 6):
        site.save(generation(round, round - 1))
    (tmp_path / "run-uid" / "north" / "gen-000004" / "state.json").write_text("{}")
    site.prune(5)
    assert site.generations() == [4, 5]


# -- the lock -------------------------------------------------------------------


def test_one_process_a_site_and_run(tmp_path: Path) -> None:
    with state(tmp_path), state(tmp_path, "south"):
        with pytest.raises(StateLocked, match=rf"the state of site 'north' .*{os.getpid()}"):
            state(tmp_path).__enter__()
        code = (
            "import sys\nfrom pathlib import Path\nfrom flower_geo.site.state import SiteState\n"
            "with SiteState(Path(sys.argv[1]), 'run', 'uid', 'north'): pass\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "StateLocked" in done.stderr
    with state(tmp_path):
        pass


def test_an_error_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), state(tmp_path):
        raise RuntimeError
    with state(tmp_path):
        pass


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot use"), state(tmp_path / "file"):
        raise AssertionError("not reached")


def test_what_a_killed_process_left_half_written_is_removed(tmp_path: Path) -> None:
    site = state(tmp_path)
    site.save_base(3, "old", {"w": torch.ones(2)})
    folder = tmp_path / "run-uid" / "north"
    (folder / ".gen-000004.abcdefgh").mkdir()
    (folder / ".old-base.abcdefgh").mkdir()
    os.rename(folder / "base", folder / ".old-base.abcdefgh" / "old")
    assert site.base() == (-1, "")
    with site:
        assert site.base() == (3, "old")
    assert sorted(entry.name for entry in folder.iterdir()) == ["base", "lock"]
