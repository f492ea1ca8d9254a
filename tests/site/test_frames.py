"""Frames between ClientApp and worker: whole, small, and never trusted with a size."""

from __future__ import annotations

import json
import os
import socket
import tempfile
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Array, ArrayRecord

from flower_geo.errors import StateError, WorkerFailed
from flower_geo.messages import Reply, Request
from flower_geo.site import frames
from flower_geo.site.place import Place

Line = tuple[socket.socket, socket.socket]


@pytest.fixture
def line() -> Iterator[Line]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def record() -> ArrayRecord:
    found = ArrayRecord()
    found["a.weight"] = Array("float32", (2, 3), "geo/1", os.urandom(5000))
    found["empty"] = Array("bfloat16", (0,), "geo/1", b"")
    found["scalar"] = Array("float32", (), "numpy.ndarray", b"\x93NUMPY")
    return found


def test_arrays_travel_as_they_are(line: Line, tmp_path: Path) -> None:
    one, other = line
    sent = record()
    table, file = frames.spooled(sent, tmp_path)
    assert file is not None and list(tmp_path.iterdir()) == []
    frames.send(one, {"kind": "x", "arrays": table}, file.fileno())
    file.close()
    got = frames.receive(other)
    assert got is not None
    frame, descriptor = got
    assert descriptor is not None and frame["kind"] == "x"
    for _ in range(2):  # the file can be read again, for another worker
        found = frames.read_arrays(frame["arrays"], descriptor)
        assert found is not None and list(found) == list(sent)
        for name, array in found.items():
            mine = sent[name]
            assert (array.dtype, array.shape, array.stype, array.data) == (
                mine.dtype, tuple(mine.shape), mine.stype, mine.data,
            )  # fmt: skip
    os.close(descriptor)
    one.close()
    assert frames.receive(other) is None
    assert frames.spooled(None, tmp_path) == (0, None)
    assert frames.read_arrays(0, None) is None


HOSTILE: list[tuple[Any, bytes]] = [
    ([["a", "f", [1], "s", 2**60]], b""), ([["a", "f", [1], "s", -1]], b""),
    ([["a", "f", [1], "s", 4]], b"123"), ([["a", "f", [1], "s", 4]], b"12345"),
    ([["a", "f", [1], "s", True]], b"1"), ([["a", "f", [-1], "s", 1]], b"1"),
    ([["a", "f", 3, "s", 1]], b"1"), ([["a", 2, [1], "s", 1]], b"1"), ({"a": 1}, b""), (7, b""),
    ([[]], b""), ([["a", "f", [1], "s", 1.0]], b"1"), ("x", b""),
]  # fmt: skip


@pytest.mark.parametrize(("table", "data"), HOSTILE)
def test_a_table_that_lies_allocates_nothing(table: Any, data: bytes) -> None:
    text = json.dumps(table).encode()
    with tempfile.TemporaryFile() as file:
        file.write(text + data)
        file.flush()
        tracemalloc.start()
        try:
            with pytest.raises(WorkerFailed):
                frames.read_arrays(len(text), file.fileno())
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()
        for odd in (-1, len(text) + len(data) + 1, 2**62, "4", None, True, 1.5):
            with pytest.raises(WorkerFailed):
                frames.read_arrays(odd, file.fileno())
    with pytest.raises(WorkerFailed, match="without their file"):
        frames.read_arrays(3, None)


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\0\0\0\x03abc", b"\0\0\0\x02[]", b"\0\0\0\x01\xff"]
)
def test_what_is_no_frame(line: Line, data: bytes) -> None:
    line[0].sendall(data)
    with pytest.raises(WorkerFailed):
        frames.receive(line[1])


def test_a_frame_that_is_cut_off(line: Line) -> None:
    line[0].sendall(b"\0\0\0\x09{")
    line[0].close()
    with pytest.raises(ConnectionResetError):
        frames.receive(line[1])


def test_a_frame_that_is_too_long_is_not_sent(line: Line) -> None:
    with pytest.raises(WorkerFailed, match="too long"):
        frames.send(line[0], {"text": "x" * frames.MAX_FRAME})


def test_requests_and_replies_survive() -> None:
    request = Request("run", "uid", round=3, position=0.1, config={"inner-lr": 1e-3, "model": "m"})
    text = json.loads(json.dumps(frames.values_of(request)))
    assert frames.request_from(text, None) == request
    reply = Reply("done", "north", metrics={"loss-before": 0.1 + 0.2, "seconds": 1e-300})
    text = json.loads(json.dumps(frames.values_of(reply)))
    assert frames.reply_from(text, None) == reply
    odds: list[Any] = [None, [], {}, {**text, "more": 1}]
    for odd in odds:
        with pytest.raises(WorkerFailed):
            frames.reply_from(odd, None)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot write to"):
        frames.spooled(record(), tmp_path / "not-there")
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match="cannot use"):
        Place(tmp_path / "file" / "x").make()
    assert Place(tmp_path / "nobody").connect() is None
    assert Place(tmp_path / "nobody").owner() is None
