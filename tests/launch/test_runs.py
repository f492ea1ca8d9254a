from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

from flower_geo.errors import ConfigError, StateError
from flower_geo.launch import runs
from flower_geo.launch.runs import RunOptions, plan

PROBE = Path(__file__).parent / "probe"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "flwr"
    home.mkdir()
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local:"\n'
        '[superlink.here]\naddress = "127.0.0.1:9"\ninsecure = true\n'
        '[superlink.cloud]\naddress = "superlink.example:443"\n'
        '[superlink.sim]\naddress = ":local-in-memory:"\n'
    )
    monkeypatch.setenv("FLWR_HOME", str(home))
    monkeypatch.chdir(tmp_path)


def _options(*config: str, **others: object) -> RunOptions:
    return RunOptions(str(PROBE), run_config=config, **others)  # type: ignore[arg-type]


@pytest.mark.parametrize("federation", ["", "local", "sim"])
def test_a_simulation_gets_an_absolute_run_dir(tmp_path: Path, federation: str) -> None:
    chosen = plan(_options("rounds=2", "run-name=abc", federation=federation))
    assert chosen.cli is None and chosen.sites == 4 and chosen.rounds == 2
    assert chosen.request.private
    assert chosen.request.folder == tmp_path / "runs" / "abc"
    assert chosen.request.run_config == {
        "rounds": 2, "run-name": "abc", "run-dir": str(tmp_path / "runs"),
    }  # fmt: skip


def test_a_coordinator_on_this_machine_is_followed_in_its_folder(tmp_path: Path) -> None:
    chosen = plan(_options(federation="here"))
    assert chosen.cli is not None and chosen.cli.connection == "here"
    assert chosen.request.folder == tmp_path / "runs" / "probe"
    assert not chosen.request.private


def test_local_paths_are_made_absolute_where_the_coordinator_is_here(tmp_path: Path) -> None:
    for name in ("my-model", "gpt2-nano", "texts"):
        (tmp_path / name).mkdir()
    given = {"model": "my-model", "tokenizer": "builtin", "data": "texts[*]", "run-name": "texts"}
    assert runs._with_absolute_paths(given) == given | {
        "model": str(tmp_path / "my-model"), "data": str(tmp_path / "texts") + "[*]",
    }  # fmt: skip
    for name in ("gpt2-nano", "some/hub-name", "missing"):
        assert runs._with_absolute_paths({"model": name}) == {"model": name}
    assert runs._with_absolute_paths({"model": "./gpt2-nano"})["model"].startswith(str(tmp_path))


def test_a_coordinator_elsewhere_chooses_its_own_folder(tmp_path: Path) -> None:
    chosen = plan(_options("rounds=2", federation="cloud"))
    assert chosen.request.folder is None
    assert chosen.request.run_config == {"rounds": 2}
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ConfigError, match="--fresh needs the coordinator on this machine"):
        plan(_options(federation="cloud", fresh=True))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunOptions("nowhere"), "no Flower app"),
        (_options("ronds=3"), "did you mean 'rounds'"),
        (_options("rounds=many"), "rounds='many'"),
        (_options("rounds=0"), "greater than or equal to 1"),
        (_options("inner-lr=0.1"), "no 'inner-lr' in .*pyproject.toml"),
        (_options(federation="cluod"), "no connection 'cluod'.*cloud"),
        (_options(federation="here", sites=3), "--sites is for simulations"),
        (_options("min-sites=5"), "min-sites=5 cannot be met by 4"),
        (_options("missing.toml"), "cannot read missing.toml"),
        (_options("rounds=2 rounds=3"), "'rounds' is given twice"),
    ],
)
def test_what_is_wrong_is_said_before_anything_starts(
    options: RunOptions, words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        plan(options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "runs").exists()


def test_the_number_of_sites_may_come_from_the_federation_config() -> None:
    assert plan(_options(federation_config=["num-supernodes=6"])).sites == 6
    assert plan(_options(sites=3, federation_config=["num-supernodes=6"])).sites == 3


def test_fresh_removes_a_run_folder_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "probe"
    (folder / "checkpoints").mkdir(parents=True)
    plan(_options())
    assert (folder / "checkpoints").exists()
    plan(_options(fresh=True))
    assert not (folder / "checkpoints").exists()
    (folder / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="does not look like a run folder"):
        plan(_options(fresh=True))
    assert (folder / "thesis.tex").exists()


def test_a_run_at_work_is_not_disturbed(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "probe"
    folder.mkdir(parents=True)
    server = tmp_path / "flwr-serverapp"
    shutil.copy("/bin/sleep", server)
    pid = os.spawnv(os.P_NOWAIT, str(server), [str(server), "60"])
    try:
        while server.name not in " ".join(psutil.Process(pid).cmdline()):
            time.sleep(0.01)  # it has forked and not become the command yet
        (folder / "server.pid").write_text(f"{pid}\n")
        with pytest.raises(StateError, match=f"at work already \\(pid {pid}"):
            plan(_options(fresh=True))
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    plan(_options())  # it is gone: its file means nothing
    (folder / "server.pid").write_text(f"{os.getpid()}\n")
    plan(_options())  # the pid belongs to another program now


def test_a_run_dir_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    with pytest.raises(StateError, match=r"run-dir .*runs cannot be used"):
        plan(_options())


def test_the_closing_words_name_what_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rich.console import Console

    from flower_geo.launch.supervisor import Outcome

    chosen = plan(_options())
    folder = chosen.request.folder
    assert folder is not None
    (folder / "model").mkdir()
    (folder / "metrics.jsonl").write_text("")
    end = {"sample": "It was \x1b[31ma\nprobe", "model_dir": str(folder / "model")}
    outcome = Outcome("completed", end=end, loss=5.5, restarts=2)
    assert runs._closing(outcome, chosen, Console(), 61.0) == 0
    out = capsys.readouterr().out
    assert "\x1b[31m" not in out
    assert "runs/probe/model" in out and "5.5" in out and "restarts       2" in out
    outcome = Outcome("gave-up", "it died; look")
    assert runs._closing(outcome, chosen, Console(), 61.0) == 3
    outcome = Outcome("failed", "no text")
    assert runs._closing(outcome, chosen, Console(), 61.0) == 1
    assert "error: no text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ('codec-up="int8(blok=256)"', "codec-up: .*did you mean 'block'"),
        ('codec-down="int9"', "codec-down: .*int9"),
        ('codec-up=""', "codec-up: "),
        ('codec-up="zstd(level=3)|int8"', "codec-up: .*order"),
        ('codec-up="adaptive" codec-ladder="int8"', "codec-ladder: .*two codecs or more"),
        ('codec-up="adaptive" codec-ladder="bf16 > > int8"', "codec-ladder: rung 2"),
        ('codec-up="adaptive" codec-ladder="int4 > bf16 > int4"', "codec-ladder: .*twice"),
        ('model="gpt3-pico"', "gpt3-pico"),
        ("inner-lr=inf", "inner-lr=inf.*finite"),
        ("deadline=inf", "deadline=inf.*finite"),
    ],
)
def test_values_without_a_meaning_are_refused_before_a_simulation_starts(
    given: str, words: str, tmp_path: Path
) -> None:
    app = Path(__file__).parents[2] / "apps" / "diloco"
    with pytest.raises(ConfigError, match=words):
        plan(RunOptions(str(app), run_config=[given]))
    assert not (tmp_path / "runs").exists()
