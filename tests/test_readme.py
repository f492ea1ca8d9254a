"""README.md says what is so: its table, its commands' words, its links."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import typer

from flower_geo.cli import app
from flower_geo.config import load_app

REPO = Path(__file__).resolve().parents[1]
README = (REPO / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
LINES = [line.split("#")[0].strip() for block in BLOCKS for line in block.splitlines()]
OURS = sorted({line for line in LINES if line.startswith("flower-geo ")})
FLOWERS = sorted({line for line in LINES if re.match(r"(flwr|flower-super)", line)})


def test_the_configuration_table_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(REPO / "tools" / "config_table.py"), "--check"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_commands() -> None:
    assert len(OURS) >= 6
    assert len(FLOWERS) >= 3


@pytest.mark.parametrize("line", OURS)
def test_our_commands_have_these_words(line: str) -> None:
    command: click.Command = typer.main.get_command(app)
    words = shlex.split(line)[1:]
    context = click.Context(command, info_name="flower-geo")
    while isinstance(command, click.Group):
        found = command.get_command(context, words[0])
        assert found is not None, words[0]
        command, words = found, words[1:]
        # make_context parses the words and refuses unknown ones; nothing runs.
        if not isinstance(command, click.Group):
            command.make_context(command.name, list(words), parent=context)


@pytest.mark.parametrize("line", [line for line in OURS + FLOWERS if "--run-config" in line])
def test_run_configurations_are_valid(line: str) -> None:
    words = shlex.split(line)
    load_app(REPO / "apps" / "diloco", [words[words.index("--run-config") + 1]])


@pytest.mark.parametrize("line", FLOWERS)
def test_flowers_commands_have_these_options(line: str) -> None:
    words = shlex.split(line)
    helped = subprocess.run(
        [str(Path(sys.executable).with_name(words[0])), *(["run"] if words[0] == "flwr" else []),
         "--help"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    text = re.sub(r"\x1b\[[0-9;]*m", "", helped.stdout + helped.stderr)
    for word in words:
        if word.startswith("--"):
            assert word in text, (word, text)


@pytest.mark.parametrize("target", ["demo", "test"])
def test_make_has_these_targets(target: str) -> None:
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (REPO / "Makefile").read_text(), re.MULTILINE)


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\((?!https?://)([^)#]+)\)", README):
        assert (REPO / link).exists(), link
