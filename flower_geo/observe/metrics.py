"""The metrics log: one JSON object a line, only ever appended to.

A line is written with one ``write`` on a descriptor opened for appending, so
lines of several processes do not mix and a crash can spoil the last line only.
Readers skip what they cannot read: a torn line, an event they do not know, a
key that is null or not there.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from flower_geo.errors import StateError

__all__ = ["MetricsLog", "follow", "read_metrics"]

_CHUNK: Final = 1 << 20
_LIVE_ONLY: Final = "waiting"  # many lines, of use only while they are new


class MetricsLog:
    """Appends events to a metrics file; safe to share between threads.

    Args:
        path: The file. It and its parent folders are made where missing.
        fsync: Wait for the disk after each line. Off by default: losing the last
            lines in a power cut costs figures, not the model.

    Raises:
        StateError: The file cannot be opened for writing.
    """

    def __init__(self, path: str | os.PathLike[str], *, fsync: bool = False) -> None:
        self.path = Path(path)
        self._fsync = fsync
        self._lock = threading.Lock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Readable too, because append() looks at the last byte.
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)
            self._fd = os.open(self.path, flags, 0o644)
        except OSError as error:
            raise _cannot_write(self.path, error) from error

    def append(self, **event: object) -> None:
        """Write one event as one line, adding ``time`` (Unix seconds) where it is not given.

        NaN and infinities become null, so that the file stays JSON for every
        reader; numpy and torch scalars become numbers, paths become strings.

        Raises:
            StateError: The log is closed, or the line cannot be written.
        """
        event.setdefault("time", round(time.time(), 3))
        text = json.dumps(_plain(event), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        # A lone surrogate becomes \udXXX, which is how JSON spells it.
        line = text.encode("utf-8", "backslashreplace") + b"\n"
        with self._lock:
            if self._fd < 0:
                raise StateError(f"metrics log {self.path} is closed; open a new MetricsLog")
            try:
                self._write(line)
            except OSError as error:
                raise _cannot_write(self.path, error) from error

    def _write(self, line: bytes) -> None:
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            # A writer died within its line: end that line, or it would swallow ours.
            line = b"\n" + line
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]
        if self._fsync:
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; closing twice does nothing."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read every whole event of a metrics file, in file order.

    ``waiting`` events are left out: there may be very many, and they say nothing
    once their round is over. A file that does not exist holds no events.

    Raises:
        StateError: The file exists and cannot be read.
    """
    events = []
    try:
        with open(path, "rb") as file:
            for line in file:
                event = _parse(line)
                if event is not None and event.get("event") != _LIVE_ONLY:
                    events.append(event)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateError(
            f"cannot read metrics file {os.fspath(path)}: {error.strerror or error}; "
            "check that it is a file you may read"
        ) from error
    return events


def follow(
    path: str | os.PathLike[str],
    stop: Callable[[], bool],
    *,
    offset: int = 0,
    poll_seconds: float = 0.2,
) -> Iterator[dict[str, Any]]:
    """Yield events as they are appended, until ``stop()`` is true and all is read.

    Waits for a file that does not exist yet, and begins again at the first byte
    when the file is replaced or cut short, so it outlives a restart of the writer.

    Args:
        path: The metrics file.
        stop: Asked once a poll; what was written before it turned true is yielded.
        offset: First byte to read, for a reader that wants new events only.
        poll_seconds: Sleep between two looks at an idle file.
    """
    tail = _Tail(Path(path), offset)
    try:
        while True:
            last_look = stop()  # before reading, so that nothing written earlier is missed
            found = False
            for event in tail.events():
                found = True
                yield event
            if last_look:
                yield from tail.leftover()
                return
            if not found:
                time.sleep(poll_seconds)
    finally:
        tail.close()


class _Tail:
    """Reads a growing file line by line and notices when another file took its place."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path = path
        self._offset = offset
        self._fd = -1
        self._partial = b""

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of every line that is complete by now."""
        if not self._open():
            return
        while chunk := os.pread(self._fd, _CHUNK, self._offset):
            self._offset += len(chunk)
            *lines, self._partial = (self._partial + chunk).split(b"\n")
            for line in lines:
                event = _parse(line)
                if event is not None:
                    yield event

    def leftover(self) -> Iterator[dict[str, Any]]:
        """Yield the last line when it is whole but for its line break."""
        event = _parse(self._partial)
        if event is not None:
            yield event

    def _open(self) -> bool:
        try:
            now = os.stat(self._path)
            if self._fd >= 0:
                held = os.fstat(self._fd)
                replaced = (held.st_dev, held.st_ino) != (now.st_dev, now.st_ino)
                if replaced or now.st_size < self._offset:
                    self.close()
                    self._offset = 0
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_RDONLY)
                if self._offset > now.st_size:
                    self._offset = 0
        except OSError:
            # Not there yet, or gone: whatever comes next is read from its first byte.
            if self._fd >= 0:
                self.close()
                self._offset = 0
            return False
        return True

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._partial = b""


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return event if isinstance(event, dict) else None


def _plain(value: object) -> object:
    """Return ``value`` built of JSON's own types only."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted((_plain(item) for item in value), key=str)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    to_list = getattr(value, "tolist", None)  # numpy and torch, without importing either
    return _plain(to_list()) if callable(to_list) else str(value)


def _cannot_write(path: Path, error: OSError) -> StateError:
    return StateError(
        f"cannot write metrics file {path}: {error.strerror or error}; "
        "free space there or choose another run-dir"
    )
