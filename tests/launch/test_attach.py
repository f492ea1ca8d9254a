from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from flower_geo import cli
from flower_geo.errors import ConfigError, StateLocked
from flower_geo.launch import attach as module
from flower_geo.launch.attach import attach, find_run
from flower_geo.launch.record import Course, Order, RunRecord, Status, supervising
from flower_geo.launch.runs import RunPlan

APP = Path(__file__).parent / "probe"


def _folder(tmp_path: Path, connection: str = "here", **course: object) -> Path:
    folder = tmp_path / "runs" / "abc"
    folder.mkdir(parents=True)
    (tmp_path / "config.toml").write_text(
        '[superlink.here]\naddress = "127.0.0.1:9"\ninsecure = true\n'
    )
    order = Order(APP, {"rounds": 3}, {}, connection, tmp_path, 4, 3, 5)
    RunRecord(folder, order, Course(**course)).store()  # type: ignore[arg-type]
    return folder


@pytest.fixture
def carried(monkeypatch: pytest.MonkeyPatch) -> list[RunPlan]:
    plans: list[RunPlan] = []

    def carry_out(chosen: RunPlan, *_: object, **__: object) -> int:
        plans.append(chosen)
        return 0

    monkeypatch.setattr(module, "carry_out", carry_out)
    return plans


def test_a_run_is_found_by_its_folder_or_its_name(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    assert find_run(str(folder)) == folder
    assert find_run("abc", str(tmp_path / "runs")) == folder
    for name in ("abd", ""):
        with pytest.raises(ConfigError, match=r"neither .* is a run folder"):
            find_run(name, str(tmp_path / "runs"))


def test_a_run_that_was_submitted_is_followed(tmp_path: Path, carried: list[RunPlan]) -> None:
    folder = _folder(tmp_path, run_id="7", restarts=1, failures=1, committed=2)
    assert attach(str(folder)) == 0
    (chosen,) = carried
    assert chosen.cli is not None and chosen.cli.connection == "here"
    assert chosen.request.run_config == {"rounds": 3} and chosen.request.folder == folder
    assert chosen.course == Course("7", 1, 1, 2)


@pytest.mark.parametrize(("connection", "run_id"), [("", "7"), ("here", "")])
def test_what_cannot_live_any_more_is_submitted_again(
    tmp_path: Path, carried: list[RunPlan], connection: str, run_id: str
) -> None:
    """A private simulation went with its command; a submission nobody heard of is begun anew."""
    folder = _folder(tmp_path, connection, run_id=run_id, committed=2)
    assert attach(str(folder)) == 0
    assert carried[0].course == Course("", 1, 0, 2)
    assert carried[0].request.private == (connection == "")


@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("failed", 1), ("gave-up", 3)])
def test_a_run_that_is_over_is_said_to_be(
    tmp_path: Path, carried: list[RunPlan], status: Status, code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = _folder(tmp_path, status=status, reason="too few [sites]")
    assert attach(str(folder), console=Console(width=200)) == code
    assert not carried
    out = capsys.readouterr().out
    assert status in out and ("too few [sites]" in out or status == "completed")


def test_another_supervisor_is_left_alone(tmp_path: Path, carried: list[RunPlan]) -> None:
    folder = _folder(tmp_path, run_id="7")
    with supervising(folder), pytest.raises(StateLocked, match="looks after run 'abc'"):
        attach(str(folder))
    assert not carried


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "gone", run_id="7")
    with pytest.raises(ConfigError, match="no connection 'gone'"):
        attach(str(folder))
    (folder / "supervisor.json").unlink()
    (folder / "metrics.jsonl").touch()
    with pytest.raises(ConfigError, match="nobody ran 'abc'"):
        attach(str(folder))


@pytest.mark.parametrize("words", [["run"], ["run", "app", "--attach", "x"],
                                   ["run", "--attach", "no-such-run"]])  # fmt: skip
def test_wrong_words_are_exit_code_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")
