from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from flower_geo.errors import ConfigError, StateError, StateLocked
from flower_geo.launch.processes import ProcessRef
from flower_geo.launch.record import Course, Order, RunRecord, supervising


def _record(folder: Path) -> RunRecord:
    order = Order(
        Path("/apps/x"), {"rounds": 3, "run-name": "ü"}, {"a": 0.5}, "geo", Path("/h"), 4, 3, 5
    )
    course = Course("7", 1, 2, 9, 100, (3, 2**62), ProcessRef(11, 12.5), "gave-up", "it died")
    return RunRecord(folder, order, course)


def test_a_record_is_private_and_read_back(tmp_path: Path) -> None:
    record = _record(tmp_path)
    record.store()
    again = RunRecord.load(tmp_path)
    assert (again.order, again.course) == (record.order, record.course)
    assert stat.S_IMODE((tmp_path / "supervisor.json").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["supervisor.json"]


def test_a_folder_without_a_record_is_no_supervised_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nobody ran"):
        RunRecord.load(tmp_path)


@pytest.mark.parametrize(
    "spoilt",
    [
        "", "[]", "{}", "null", "[" * 100_000,
        {"format": 2}, {"order": []}, {"course": {}}, {"supervisor": "x"},
    ],
)  # fmt: skip
def test_a_spoilt_record_is_said_to_be_one(tmp_path: Path, spoilt: object) -> None:
    _record(tmp_path).store()
    path = tmp_path / "supervisor.json"
    if isinstance(spoilt, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | spoilt))
    else:
        path.write_text(str(spoilt))
    with pytest.raises(StateError, match=r"cannot be read.*without --attach") as caught:
        RunRecord.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("order", "rounds", -1), ("order", "sites", "4"), ("order", "run_config", [1]),
        ("order", "connection", None), ("course", "status", "fine"), ("course", "offset", -1),
        ("course", "stamp", [1]), ("course", "server", {"pid": "x"}), ("course", "more", 1),
    ],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused(
    tmp_path: Path, part: str, key: str, value: object
) -> None:
    _record(tmp_path).store()
    path = tmp_path / "supervisor.json"
    values = json.loads(path.read_text())
    values[part][key] = value
    path.write_text(json.dumps(values))
    with pytest.raises(StateError, match="cannot be read"):
        RunRecord.load(tmp_path)


def test_there_is_one_supervisor_and_its_lock_dies_with_it(tmp_path: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from flower_geo.launch.record import supervising\n"
        "with supervising(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(StateLocked, match=rf"another flower-geo run \(pid {other.pid}\)"):
            with supervising(tmp_path):
                pass
        other.kill()
    with supervising(tmp_path):
        pass
    with supervising(tmp_path):
        pass
