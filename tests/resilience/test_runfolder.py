"""The run folder: one owner, one configuration, one count of lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flower_geo.config import FIXED_KEYS, DiLoCoConfig, SplitConfig
from flower_geo.errors import (
    CheckpointCorrupt,
    ConfigError,
    FlowerGeoError,
    ResumeMismatch,
    StateError,
    StateLocked,
)
from flower_geo.resilience.runfolder import RunFolder

#: A configuration that has every fixed key.
CONFIG: dict[str, Any] = SplitConfig().public() | DiLoCoConfig().public()
OTHER: dict[str, Any] = {
    "model": "llama-nano", "tokenizer": "elsewhere", "data": "corpus:sotu", "seq-len": 64,
    "seed": 1, "strategy": "fedavg", "error-feedback": False, "codec-down": "fp32",
    "aggregation": "avg", "rank": 8, "alpha": 1.0, "rslora": True, "target-modules": "q_proj",
    "rank-pattern": "q_proj=4", "alpha-pattern": "q_proj=4", "modules-to-save": "lm_head",
    "personal": "*lora_B*", "mode": "vanilla", "cut-bottom": 3, "cut-top": 0,
}  # fmt: skip


def opened(path: Path, **changed: Any) -> RunFolder:
    return RunFolder(path, {**CONFIG, **changed})


def test_lives_are_counted_and_the_uid_stays(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        with opened(tmp_path / "run") as folder:
            seen.append((folder.uid, folder.incarnation))
            assert (tmp_path / "run" / "server.pid").read_text() == f"{os.getpid()}\n"
        assert not (tmp_path / "run" / "server.pid").exists()
    assert [number for _, number in seen] == [1, 2, 3] and len({uid for uid, _ in seen}) == 1
    with opened(tmp_path / "other") as folder:
        assert folder.uid != seen[0][0] and folder.incarnation == 1


def test_two_servers_on_one_run(tmp_path: Path) -> None:
    with opened(tmp_path / "run"):
        with pytest.raises(StateLocked, match=rf"run 'run' is in use by process {os.getpid()} "):
            opened(tmp_path / "run")
        # Another process is refused too, and says so in one line.
        code = (
            "import sys\nfrom pathlib import Path\n"
            "from flower_geo.errors import StateLocked\n"
            "from flower_geo.resilience.runfolder import RunFolder\n"
            "try:\n    RunFolder(Path(sys.argv[1]), {})\n"
            "except StateLocked as error:\n    print(error)\n"
        )
        command = [sys.executable, "-c", code, str(tmp_path / "run")]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert f"process {os.getpid()} " in said and said.count("\n") == 1
        assert (tmp_path / "run" / "server.pid").exists()
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert stored["incarnation"] == 1 and stored["config"] == CONFIG


def test_other_values_are_for_every_fixed_key() -> None:
    assert OTHER.keys() == FIXED_KEYS
    assert all(OTHER[key] != CONFIG[key] for key in OTHER)


@pytest.mark.parametrize("key", sorted(FIXED_KEYS))
def test_a_run_is_not_resumed_as_another(tmp_path: Path, key: str) -> None:
    opened(tmp_path / "run").close()
    with pytest.raises(ResumeMismatch) as caught:
        opened(tmp_path / "run", **{key: OTHER[key]})
    assert f"{key}={CONFIG[key]!r}" in str(caught.value) and "run-name" in str(caught.value)
    # Refusing changed nothing and holds no lock.
    with opened(tmp_path / "run") as folder:
        assert folder.incarnation == 2


def test_a_fixed_key_that_is_gone_is_a_change(tmp_path: Path) -> None:
    opened(tmp_path / "run").close()
    with pytest.raises(ResumeMismatch, match="model"):
        RunFolder(tmp_path / "run", {k: v for k, v in CONFIG.items() if k != "model"})


@pytest.mark.parametrize(
    "changed",
    [{"rounds": 99}, {"quorum": "2"}, {"deadline": 5.0}, {"inner-lr": 0.5}, {"codec-up": "fp32"},
     {"checkpoint-keep": 7}, {"run-dir": "/moved"}],
)  # fmt: skip
def test_changes_that_are_allowed(tmp_path: Path, changed: dict[str, Any]) -> None:
    opened(tmp_path / "run").close()
    with opened(tmp_path / "run", **changed) as folder:
        assert folder.incarnation == 2
        assert folder.checkpoints.keep == changed.get("checkpoint-keep", 3)
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["config"]
    assert stored == {**CONFIG, **changed}


def test_a_run_dir_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "run", tmp_path / "file"):
        with pytest.raises(StateError, match="run-dir to a folder that can be written"):
            opened(path)
    with pytest.raises(ConfigError, match="run-dir is empty"):
        RunFolder.resolve("", "run")
    assert RunFolder.resolve(str(tmp_path), "x") == tmp_path / "x"
    assert RunFolder.resolve("~/runs", "x").is_absolute()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"{}", b'{"uid": "a", "incarnation": "x", "config": {}}',
     b'{"uid": "a", "incarnation": 1, "config": 5}', b"\xff\xfe", b"[" * 10**5,
     b'{"uid": "a", "incarnation": 1e999, "config": {}}',
     b'{"uid": "../../x", "incarnation": 1, "config": {}}'],
)  # fmt: skip
def test_a_damaged_config_is_named_and_the_lock_given_back(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "run" / "config.json"
    file.parent.mkdir()
    file.write_bytes(content)
    for _ in range(2):
        with pytest.raises(CheckpointCorrupt, match=r"config\.json .*choose another run-name"):
            opened(tmp_path / "run")
    assert file.read_bytes() == content


def test_what_a_killed_server_left_half_written_is_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    opened(run).close()
    left = [
        run / "checkpoints" / ".round-000003.abcdefgh", run / "spool/round-000004/.site.abcdefgh",
        run / ".model.abcdefgh",
    ]  # fmt: skip
    kept = [run / "checkpoints" / "round-000002", run / ".notes", run / "model"]
    for folder in left + kept:
        folder.mkdir(parents=True)
    opened(run).close()
    assert not any(folder.exists() for folder in left) and all(k.exists() for k in kept)


def test_closing_twice_or_without_its_folder(tmp_path: Path) -> None:
    folder = opened(tmp_path / "run")
    (tmp_path / "run" / "server.pid").unlink()
    folder.close()
    folder.close()
    with opened(tmp_path / "run") as again:
        assert again.incarnation == 2
    assert issubclass(StateLocked, FlowerGeoError)
