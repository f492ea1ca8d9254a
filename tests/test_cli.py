from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from flower_geo import cli
from flower_geo.errors import DataError
from flower_geo.observe import MetricsLog

PROBE = Path(__file__).parent / "launch" / "probe"


@pytest.mark.parametrize("words", [[], ["cluster"]])
def test_help_needs_no_heavy_library(words: list[str]) -> None:
    code = (
        "import sys\nfrom flower_geo.cli import main\n"
        f"status = main({[*words, '--help']!r})\n"
        "heavy = {'torch', 'transformers', 'flwr', 'ray', 'pydantic', 'psutil', 'numpy'}\n"
        "print(sorted(heavy & sys.modules.keys()), status)\n"
    )
    began = time.process_time()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[] 0"
    assert time.process_time() - began < 1.0
    assert ("run" if not words else "up") in done.stdout


def test_following_a_run_needs_no_torch() -> None:
    code = "import sys, flower_geo.launch.runs\nprint('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "False"


def test_a_wrong_configuration_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", str(PROBE), "-c", "ronds=3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: run-config key 'ronds' is not known")
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "a", "b", "c"],
        ["run", "a", "--max-restarts", "-1"],
        ["cluster", "up", "--sites", "0"],
        ["no-such-command"],
        ["cluster", "up", "--site-config", "data=x"],
        ["cluster", "up", "--site-config", "9:data=x"],
        ["cluster", "up", "--name", "../x"],
        ["cluster", "down", "--name", "nothing-is-up"],
        ["cluster", "status", "--name", "nothing-is-up"],
        ["report", "no-such-run"],
        ["config", "--strategy", "diloc"],
    ],
)
def test_wrong_words_are_exit_code_2(
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FLOWER_GEO_HOME", str(tmp_path))
    assert cli.main(words) == 2
    assert capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_other_errors_of_ours_are_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise DataError("no text; give some")

    monkeypatch.setattr("flower_geo.launch.doctor.examine", fails)
    assert cli.main(["doctor"]) == 1
    assert capsys.readouterr().err == "error: no text; give some\n"


def test_other_exceptions_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("flower_geo.launch.doctor.examine", breaks)
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_the_exit_code_of_a_run_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def execute(options: object) -> int:
        seen.append(options)
        return 3

    monkeypatch.setattr("flower_geo.launch.runs.execute", execute)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    words = ["run", "app", "geo", "-c", "a=1", "--run-config", "b=2", "--fresh", "--plain"]
    assert cli.main([*words, "--max-restarts", "7"]) == 3
    (options,) = seen
    assert options.app == "app" and options.federation == "geo"  # type: ignore[attr-defined]
    assert list(options.run_config) == ["a=1", "b=2"]  # type: ignore[attr-defined]
    assert options.fresh and options.plain and options.max_restarts == 7  # type: ignore[attr-defined]


def test_a_report_is_written_for_a_folder_or_a_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "first"
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.append(event="start", run="first", rounds=1)
    assert cli.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder / "report.html")
    (folder / "report.html").unlink()
    assert cli.main(["report", "first", "--run-dir", str(tmp_path)]) == 0
    assert (folder / "report.html").exists()


def test_the_keys_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["config"]) == 0
    assert "inner-steps" in capsys.readouterr().out
