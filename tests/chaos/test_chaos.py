"""Chaos, the short form: fixed seeds, a few faults each.  ``make chaos`` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.driver import Played, Volley, play
from tests.chaos.faults import FAULTS, PARTS, named

pytestmark = [
    pytest.mark.chaos, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(900),
]  # fmt: skip


@pytest.mark.parametrize(
    ("seed", "database", "faults"),
    [
        (1, False, ("superlink:kill -9", "reply:nan")),
        (2, True, ("supervisor:kill -9", "bits:flip checkpoint")),
    ],
)
def test_a_run_lives_through_chaos(
    tmp_path: Path, seed: int, database: bool, faults: tuple[str, ...]
) -> None:
    played = play(tmp_path / "stage", seed, [named(n) for n in faults], rounds=3, database=database)
    _check(played, tmp_path)
    assert any(strike.hit for strike in played.strikes), played.strikes


def test_a_run_lives_through_the_death_of_all_its_parts(tmp_path: Path) -> None:
    played = play(tmp_path / "stage", 1001, [Volley(PARTS)], rounds=3)
    _check(played, tmp_path)
    assert sum(strike.hit for strike in played.strikes) >= 4, played.strikes


def _check(played: Played, folder: Path) -> None:
    lines = "\n".join(map(str, played.strikes)) + "\n" + "\n".join(played.notes)
    log = (folder / "stage" / "run.log").read_text()
    assert not played.problems, f"{played.problems}\n{lines}\n{log[-4000:]}"
    assert played.replayed == 3 and played.retrained >= 6
    assert sum(strike.lost for strike in played.strikes) == 0
    assert all(strike.by_hand == 0 for strike in played.strikes), f"{lines}\n{log[-4000:]}"


def test_every_fault_has_a_name_of_its_own() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
