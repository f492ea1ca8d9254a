"""``flower-geo leak-check`` and ``flower-geo plan-split``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flower_geo import cli

LEAK = [
    "leak-check",
    "--model",
    "llama-pico",
    "--length",
    "16",
    "--tokens",
    "32",
    "--candidates",
    "64",
]
PLAN = ["plan-split", "--model", "llama-nano", "--seq-len", "32", "--batch-size", "2",
        "--site-gflops", "1", "--cloud-gflops", "50"]  # fmt: skip


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    Path("site.txt").write_text("\n\n".join(f"A site wrote this, {n}." for n in range(99)))
    return ["--data", "site.txt", "--public", "site.txt"]


def test_leak_check_prints_a_table_and_a_line(
    text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*LEAK, *text, "--cut", "0, 1", "--noise", "0,0.5", "--json", "out/leak.json"]
    assert cli.main(words) == 0
    title, heads, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("llama-pico, 32 tokens of site.txt, sent as fp32")
    assert heads.split()[-3:] == ["linear", "replay", "best"]
    assert [row.split()[:2] for row in rows[:4]] == [
        ["0", "0"],
        ["0", "0.5"],
        ["1", "0"],
        ["1", "0.5"],
    ]
    assert rows[4].startswith("The weights are random") and rows[5].startswith("Risk: whoever")
    assert len(json.loads(Path("out/leak.json").read_text())["leaks"]) == 4


def test_leak_check_in_markdown(text: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*LEAK, *text, "--cut", "0", "--noise", "0", "--no-replay", "--markdown"]) == 0
    title, _, heads, marks, row, *_ = capsys.readouterr().out.splitlines()
    assert (
        title.startswith("llama-pico, ")
        and heads.startswith("| layers at the site | noise |")
        and marks.startswith("| --- |")
    )
    assert row.split("|")[6].strip() == "–"


def test_plan_split_prints_both_tables_and_a_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*PLAN, "--rtt-ms", "5", "--mbit", "500"]) == 0
    out = capsys.readouterr().out
    assert "memory at the site" in out and "5 ms, 500" in out and "200 ms" not in out
    assert out.splitlines()[-1].startswith("It ")
    assert cli.main([*PLAN, "--table", "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "| 200 ms, 20 |" in out and out.count("| 50 ms, 100 |") == 1


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ([*LEAK, "--cut", "x"], 2, "--cut 'x' is no whole number"),
        ([*LEAK, "--noise", ","], 2, "--noise ',' names no value"),
        ([*LEAK, "--noise", "a"], 2, "--noise 'a' is no number"),
        ([*LEAK, "--cut", "2"], 1, "leave none"),
        ([*LEAK, "--noise", "-1"], 2, "activation noise"),
        ([*LEAK, "--codec", "int9"], 2, "--codec: codec 'int9' is not known"),
        ([*PLAN, "--codec-gradients", "int9"], 2, "--codec-gradients: codec 'int9'"),
        ([*PLAN, "--cut-bottom", "4"], 1, "leave none"),
        ([*PLAN, "--mbit", "0"], 2, "carries nothing"),
        ([*PLAN, "--micro-batches", "0"], 2, "micro-batches 0"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], code: int, said: str, text: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*words, *(text if words[0] == "leak-check" else [])]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and said in captured.err


@pytest.mark.parametrize(("command", "word"), [("leak-check", "--noise"), ("plan-split", "--mbit")])
def test_help_answers_without_torch(command: str, word: str) -> None:
    code = (
        f"import sys\nfrom flower_geo.cli import main\nmain(['{command}', '--help'])\n"
        "print(sorted({'torch', 'numpy', 'flwr', 'psutil'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]" and word in done.stdout
