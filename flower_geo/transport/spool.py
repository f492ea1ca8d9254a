"""Blobs on their way: read piece by piece, gathered in memory or in a file without a name.

A blob larger than the memory one wants to spend on it is never in memory as a
whole: it is written to a temporary file that has no name any more (so nothing is
left behind, however the process ends) and handed on as a view of that file's
mapping, which reads like any other bytes.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from typing import IO, Any, Protocol, cast

from flower_geo.calls import Blob
from flower_geo.errors import CallFailed, FrameRefused
from flower_geo.transport.limits import Limits

__all__ = ["Sink", "Store", "flat_view", "read_piece"]


class _Mapped(mmap.mmap):
    """A mapping that can be read without touching its pages, which would count as memory."""

    file = -1


def flat_view(name: str, blob: Blob) -> memoryview:
    """A view of a blob's bytes.

    Raises:
        FrameRefused: it is not one run of bytes.
    """
    try:
        return memoryview(blob).cast("B")
    except (TypeError, ValueError):
        raise FrameRefused(f"blob {name[:80]!r} is no run of bytes; encode it first") from None


def read_piece(view: memoryview, start: int, stop: int) -> bytes:
    """Bytes ``start`` to ``stop`` of a view from :func:`flat_view`, without keeping its pages."""
    base = view.obj
    if isinstance(base, _Mapped) and len(base) == len(view):
        return _read_exactly(base.file, start, stop)
    piece = bytes(view[start:stop])
    if isinstance(base, mmap.mmap) and len(base) == len(view) and memoryview(base).readonly:
        # Pages of a file that is only read: the system keeps them, this process need not.
        first = start - start % mmap.PAGESIZE
        base.madvise(mmap.MADV_DONTNEED, first, stop - first)
    return piece


def _read_exactly(file: int, start: int, stop: int) -> bytes:
    """Without moving the file's position: one blob may be on its way to several sites."""
    pieces = []
    while start < stop and (piece := os.pread(file, stop - start, start)):
        pieces.append(piece)
        start += len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class Sink(Protocol):
    """Takes the pieces of one blob, in order."""

    def write(self, piece: bytes) -> None:
        """Take the next piece."""

    def finish(self) -> Blob:
        """The whole blob."""

    def drop(self) -> None:
        """Forget it."""


class _MemorySink:
    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def write(self, piece: bytes) -> None:
        self._pieces.append(piece)

    def finish(self) -> Blob:
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def drop(self) -> None:
        self._pieces = []


class _FileSink:
    def __init__(self, folder: str | None) -> None:
        self._file = cast(IO[Any], _guarded(tempfile.TemporaryFile, dir=folder, buffering=0))

    def write(self, piece: bytes) -> None:
        view = memoryview(piece)
        while view:
            view = view[_guarded(self._file.write, view) :]

    def finish(self) -> Blob:
        mapped: _Mapped = _guarded(_Mapped, self._file.fileno(), 0, access=mmap.ACCESS_READ)
        mapped.file = os.dup(self._file.fileno())
        weakref.finalize(mapped, os.close, mapped.file).atexit = False
        self._file.close()
        return memoryview(mapped)

    def drop(self) -> None:
        self._file.close()


def _guarded(do: Any, *args: Any, **named: Any) -> Any:
    try:
        return do(*args, **named)
    except OSError as error:
        raise CallFailed(
            f"a large blob cannot be put into a file: {error.strerror or error}; "
            "free the disk, or name another folder",
            retry=True,
        ) from None


class Store:
    """Where arriving blobs go; keeps count of those in memory.  Safe for threads."""

    def __init__(self, limits: Limits) -> None:
        self._limits, self._lock = limits, threading.Lock()
        self.held = 0

    def sink(self, total: int) -> tuple[Sink, int]:
        """A sink for a blob, and the bytes of memory it is to be charged with."""
        with self._lock:
            if total > self._limits.spool or self.held + total > self._limits.memory:
                return _FileSink(self._limits.folder), 0
            self.held += total
        return _MemorySink(), total

    def release(self, charged: int) -> None:
        """Bytes that are no longer on their way."""
        with self._lock:
            self.held -= charged
