"""``flower-geo codec``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flower_geo import cli


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {"a.weight": torch.randn(64, 200) * 0.1, "a.bias": torch.zeros(200)}
    save_file(tensors, tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors"


def lines(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    """Words of each line printed."""
    captured = capsys.readouterr()
    assert not captured.err
    return [line.split() for line in captured.out.splitlines()]


def test_a_row_a_codec(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = ["fp32", "int8(block=256)", "topk(density=0.03,chunk=4096)|int4(block=64)"]
    assert cli.main(["codec", str(file), *(w for s in specs for w in ("--spec", s))]) == 0
    title, heads, *rows = lines(capsys)
    assert title[:5] == ["13,000", "values", "in", "2", "tensors,"]
    assert heads[0] == "codec"
    assert [row[0] for row in rows] == specs
    ratios = [float(row[1]) for row in rows]
    bits = [float(row[2]) for row in rows]
    assert ratios == sorted(ratios) and ratios[0] < 1.02 and ratios[2] > 20
    assert all(r * b == pytest.approx(32, rel=0.02) for r, b in zip(ratios, bits, strict=True))
    assert rows[0][3:5] == ["0", "0"] and 0 < float(rows[1][3]) < 0.01 < float(rows[2][3]) < 1
    assert all(float(row[5].replace(",", "")) > 0 for row in rows)


def test_a_row_a_tensor(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["codec", str(file), "--spec", "int8"]) == 0
    title, heads, *rows = lines(capsys)
    assert title[-1] == "int8(block=256)" and heads[0] == "tensor"
    assert [row[0] for row in rows] == ["a.bias", "a.weight", "all"]
    words = ["--spec", "int8", "--spec", "bf16", "--tensors", "--only", "*.weight"]
    assert cli.main(["codec", str(file), *words]) == 0
    _, _, *rows = lines(capsys)
    assert [row[:2] for row in rows[::2]] == [
        ["int8(block=256)", "a.weight"], ["bf16", "a.weight"],
    ]  # fmt: skip
    assert [row[0] for row in rows[1::2]] == ["int8(block=256)", "bf16"]


def test_without_a_codec_several_are_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["codec", str(file)]) == 0
    _, _, *rows = lines(capsys)
    assert len(rows) >= 6 and {"fp32", "bf16"} < {row[0] for row in rows}


def test_on_a_terminal_it_is_a_table(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["codec", str(file)]) == 0
    out = capsys.readouterr().out
    assert "──────" in out and "enc MB/s" in out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["none.safetensors"], 2, "there is no file none.safetensors; name"),
        (["w.safetensors", "--spec", "int9"], 2, "--spec: codec 'int9' is not known, did you mean"),
        (["w.safetensors", "--spec", "int8(blok=2)"], 2, "did you mean 'block'?"),
        (["w.safetensors", "--only", "*.x"], 2, "no tensor that matches *.x"),
        (["w.safetensors", "--spec", "*.bias=int8"], 1, "no codec rule matches tensor 'a.weight'"),
        (["text"], 1, "text is no whole safetensors file"),
        (["ints.safetensors"], 1, "tensor n of ints.safetensors is int64, not floating point"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str],
    code: int,
    said: str,
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(file.parent)
    Path("text").write_text("These are no tensors.\n")
    save_file({"n": torch.arange(4)}, "ints.safetensors")
    assert cli.main(["codec", *words]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and said in captured.err


def test_help_answers_without_torch() -> None:
    code = (
        "import sys\nfrom flower_geo.cli import main\nmain(['codec', '--help'])\n"
        "print(sorted({'torch', 'numpy', 'flwr'} & sys.modules.keys()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]" and "--spec" in done.stdout
