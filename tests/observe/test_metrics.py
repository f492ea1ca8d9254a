"""The log survives crashes, odd values and being replaced; its readers never stumble."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.errors import StateError
from flower_geo.observe import MetricsLog, follow, read_metrics

json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_what_is_appended_is_read_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(event="start", sites=["a", "b"])
        log.append(event="round", round=1, time=12.5)
    first, second = read_metrics(path)
    assert first["event"] == "start"
    assert first["sites"] == ["a", "b"]
    assert abs(first["time"] - time.time()) < 60
    assert second == {"event": "round", "round": 1, "time": 12.5}


@given(event=st.dictionaries(st.text().filter(lambda key: key != "self"), json_values, max_size=5))
def test_any_json_event_makes_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, event: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    event |= {"event": "x", "time": 0}
    with MetricsLog(path) as log:
        log.append(**event)
    expected = json.loads(json.dumps(event).replace("Infinity", "null").replace("-null", "null"))
    if "Infinity" not in json.dumps(event, ensure_ascii=False):
        assert read_metrics(path) == [expected]
    assert path.read_bytes().count(b"\n") == 1


def test_values_json_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(
            event="site",
            nan=math.nan,
            deep=[math.inf, {"x": -math.inf}],
            scalar=np.float32(0.5),
            bad_scalar=np.float64("nan"),
            array=np.arange(3),
            path=Path("runs/x"),
            names={"b", "a"},
            lone="\udc80",
        )
    (event,) = read_metrics(path)
    assert event["nan"] is None
    assert event["deep"] == [None, {"x": None}]
    assert event["scalar"] == 0.5
    assert event["bad_scalar"] is None
    assert event["array"] == [0, 1, 2]
    assert event["path"] == "runs/x"
    assert event["names"] == ["a", "b"]
    assert event["lone"] == "\udc80"
    strict = json.loads(path.read_text(), parse_constant=pytest.fail)  # no NaN, no Infinity
    assert strict["event"] == "site"


@pytest.mark.parametrize("cut", range(1, 40))
def test_a_torn_last_line_costs_that_line_only(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.append(event="round", round=1)
        whole = path.stat().st_size
        log.append(event="round", round=2, note="ünïcode")
    data = path.read_bytes()
    path.write_bytes(data[: min(whole + cut, len(data) - 1)])
    kept = [event["round"] for event in read_metrics(path)]
    assert kept in ([1], [1, 2])
    with MetricsLog(path, fsync=True) as log:  # a new writer does not grow onto the torn line
        log.append(event="round", round=3)
    assert [event["round"] for event in read_metrics(path)] == [*kept, 3]


def test_a_writer_that_is_open_already_does_not_grow_onto_anothers_torn_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        with path.open("ab") as other:
            other.write(b'{"event": "rou')
        log.append(event="round", round=7)
    assert [event["round"] for event in read_metrics(path)] == [7]


def test_lines_that_are_no_events_and_waiting_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [b"", b"null", b"[1]", b"\xff\xfe", b"{", b"[" * 100_000, b'{"event":"waiting"}']
    path.write_bytes(b"\n".join([*lines, b'{"event":"from a later release","x":NaN}', b""]))
    (event,) = read_metrics(path)
    assert event["event"] == "from a later release"


def test_threads_do_not_mix_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log, MetricsLog(path) as other:

        def write(to: MetricsLog, who: int) -> None:
            for i in range(50):
                to.append(event="site", who=who, i=i, pad="x" * 3000)

        threads = [threading.Thread(target=write, args=((log, other)[w % 2], w)) for w in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    events = read_metrics(path)
    assert len(events) == 200
    for who in range(4):
        assert [e["i"] for e in events if e["who"] == who] == list(range(50))


def test_errors_name_the_file_and_a_remedy(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StateError, match=r"cannot write metrics file .*metrics.jsonl.*run-dir"):
        MetricsLog(blocked / "metrics.jsonl")
    with pytest.raises(StateError, match=r"cannot read metrics file"):
        read_metrics(tmp_path)
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.close()
    log.close()
    with pytest.raises(StateError, match="is closed"):
        log.append(event="round")
    assert read_metrics(tmp_path / "never-written.jsonl") == []


def _take(events: Iterator[dict[str, Any]], count: int) -> list[int]:
    return [next(events)["i"] for _ in range(count)]


def test_follow_waits_for_the_file_and_yields_lines_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    stopped = threading.Event()

    def write() -> None:
        time.sleep(0.05)
        with MetricsLog(path) as log:
            for i in range(5):
                log.append(event="waiting", i=i)
                time.sleep(0.01)
        stopped.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = [event["i"] for event in follow(path, stopped.is_set, poll_seconds=0.005)]
    writer.join()
    assert seen == [0, 1, 2, 3, 4]


def test_follow_begins_anew_when_the_file_is_replaced_cut_or_gone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"i":1}\n{"i":2}\n{"i":')
    events = follow(path, lambda: False, poll_seconds=0.001)
    assert _take(events, 2) == [1, 2]
    fresh = tmp_path / "fresh"
    fresh.write_text('{"i":10}\n{"i":11}\n{"i":12}\n')
    os.replace(fresh, path)
    assert _take(events, 3) == [10, 11, 12]
    path.write_text('{"i":20}\n')  # the same file, cut short
    assert _take(events, 1) == [20]
    path.unlink()
    timer = threading.Timer(0.05, path.write_text, ['{"i":30}\n{"i":31}\n{"i":32}\n'])
    timer.start()
    assert _take(events, 3) == [30, 31, 32]
    timer.join()
    events.close()  # type: ignore[attr-defined]


def test_follow_joins_a_line_written_in_two_pieces_and_skips_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"i":1}\n{"i"')
    stop = False
    events = follow(path, lambda: stop, poll_seconds=0.001)
    assert _take(events, 1) == [1]
    with path.open("a") as file:
        file.write(':2}\n{"torn\n{"i":3}\n{"i":4}')  # the last is whole but for its line break
    stop = True
    assert [event["i"] for event in events] == [2, 3, 4]


def test_follow_from_an_offset_shows_new_events_only(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"i":1}\n')
    offset = path.stat().st_size
    with path.open("a") as file:
        file.write('{"i":2}\n')
    assert [e["i"] for e in follow(path, lambda: True, offset=offset)] == [2]
    assert list(follow(tmp_path / "none.jsonl", lambda: True)) == []
