from __future__ import annotations

import importlib.metadata
import socket
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from flower_geo.launch import doctor
from flower_geo.launch.doctor import Finding, examine, satisfies, table
from flower_geo.models import build_model


@pytest.mark.parametrize(
    ("version", "wanted", "good"),
    [
        ("1.42.0", ">=1.42,<1.43", True),
        ("1.43.0", ">=1.42,<1.43", False),
        ("1.41.9", "<1.43,>=1.42", False),
        ("2.13.0+cpu", ">=2.9,<3", True),
        ("2.9", ">=2.9.0", True),
        ("3.0", "<3", False),
        ("0.20.1", ">=0.16,<0.21", True),
        ("5.0rc1", "", True),
    ],
)
def test_version_ranges(version: str, wanted: str, good: bool) -> None:
    assert satisfies(version, wanted) is good


def test_everything_found_here_lets_a_small_run_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWER_GEO_HOME", str(tmp_path / "state"))
    findings = examine("gpt2-nano", 32, 2, 1, tmp_path / "runs")
    assert not [finding for finding in findings if finding.blocks]
    assert not (tmp_path / "runs").exists()
    out = StringIO()
    Console(file=out, width=200).print(table(findings))
    assert "flwr 1.42" in out.getvalue()


def _what(findings: list[Finding], word: str) -> Finding:
    (found,) = [one for one in findings if word in one.what]
    return found


def test_each_fault_comes_with_its_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))
    monkeypatch.setenv("http_proxy", "http://proxy.example:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    (tmp_path / "config.toml").write_text("[broken\n")
    findings = list(doctor._flower())
    flag = _what(findings, "RUNTIME_DEPENDENCY")
    assert flag.level == "warn" and "export" in flag.remedy
    assert _what(findings, "not valid TOML").blocks
    assert "NO_PROXY" in _what(findings, "http_proxy").remedy


def test_a_missing_or_wrong_library_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_requirements", lambda: {"flwr": "<1.0", "no-such-thing": ">=1"})
    findings = list(doctor._versions())
    assert _what(findings, "flwr 1.42").blocks
    missing = _what(findings, "no-such-thing is not installed")
    assert missing.remedy == 'pip install "no-such-thing>=1"'


def test_without_ray_only_simulations_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = _what(list(doctor._versions()), "ray is not installed")
    assert found.level == "warn" and "flower-geo[sim]" in found.remedy


def test_a_model_too_large_for_the_machine_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        available = 1 << 20

    monkeypatch.setattr("psutil.virtual_memory", Little)
    findings = list(doctor._model("gpt2-nano", 128, 8, 1, tmp_path))
    assert _what(findings, "memory for gpt2-nano").blocks
    findings = list(doctor._model("gpt2-nan", 128, 8, 1, tmp_path))
    assert findings[0].blocks and "gpt2-nano" in findings[0].remedy


def test_a_folder_that_cannot_be_written_blocks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    findings = list(doctor._folders(tmp_path / "file" / "runs"))
    assert _what(findings, "run-dir").blocks


def test_a_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        monkeypatch.setattr(doctor, "_SUPERLINK_PORT", port)
        found = _what(list(doctor._ports()), f"port {port}")
    assert found.level == "warn" and "--port" in found.remedy


def test_a_model_folder_that_was_cut_is_found(tmp_path: Path) -> None:
    model = build_model("gpt2-pico", seed=0, vocab_size=64, max_seq_len=16)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    assert not any(f.blocks for f in doctor._model(str(tmp_path / "model"), 16, 1, 1, tmp_path))
    file.write_bytes(file.read_bytes()[:-100])
    (bad,) = [f for f in doctor._model(str(tmp_path / "model"), 16, 1, 1, tmp_path) if f.blocks]
    assert "no whole safetensors file" in bad.what
