"""What a ClientApp and its site's worker say to each other over a Unix socket.

A frame is four bytes of length and a JSON object, small enough for the socket's
buffer.  Arrays lie in a file that has no name any more, behind a table of what
they are; its descriptor travels with the frame.  So nothing is left on disk
whoever dies, nobody waits for a reader, and a payload is copied once in and
once out.  Imports no torch.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import IO, Any

from flwr.app import Array, ArrayRecord

from flower_geo.errors import StateError, WorkerFailed
from flower_geo.messages import Reply, Request

__all__ = [
    "read_arrays",
    "receive",
    "reply_from",
    "request_from",
    "send",
    "spooled",
    "values_of",
]

_LENGTH = struct.Struct(">I")
#: Bytes of JSON in a frame, and in the table before the arrays.
MAX_FRAME, MAX_TABLE = 2**20, 2**26
#: Bytes read or written at a time; Linux moves less than 2 GiB a call.
_PIECE = 2**30
_ARRAYS = "arrays"


def send(sock: socket.socket, frame: Mapping[str, Any], descriptor: int | None = None) -> None:
    """Send a frame and, with it, an open file.

    Raises:
        OSError: the other side is gone, or does not read.
        WorkerFailed: the frame is too large, or holds what JSON has no word for.
    """
    try:
        text = json.dumps(frame).encode()
    except (TypeError, ValueError) as error:
        raise WorkerFailed(f"this cannot be handed to a worker process: {error}") from None
    if len(text) > MAX_FRAME:
        raise WorkerFailed(
            f"a message of {len(text)} bytes to or from the worker process is too long; "
            'set node-config worker="in-process"'
        )
    data = _LENGTH.pack(len(text)) + text
    if descriptor is not None:
        sent = socket.send_fds(sock, [data[:1]], [descriptor])
        data = data[sent:]
    sock.sendall(data)


def receive(sock: socket.socket) -> tuple[dict[str, Any], int | None] | None:
    """The next frame and the descriptor that came with it (the caller closes it).

    Returns:
        None at the end of the stream.

    Raises:
        OSError: the other side is gone, or stops within a frame.
        WorkerFailed: what came is no frame.
    """
    head, descriptors, _, _ = socket.recv_fds(sock, 1, 4)
    if not head:
        return None
    try:
        for spare in descriptors[1:]:
            os.close(spare)
        (length,) = _LENGTH.unpack(head + _exactly(sock, _LENGTH.size - 1))
        if length > MAX_FRAME:
            raise WorkerFailed(f"a frame of {length} bytes is none of ours")
        frame = json.loads(_exactly(sock, length))
        if not isinstance(frame, dict):
            raise WorkerFailed("a frame holds no object")
    except BaseException as error:
        for each in descriptors[:1]:
            os.close(each)
        if isinstance(error, ValueError):
            raise WorkerFailed("a frame holds no JSON") from None
        raise
    return frame, (descriptors[0] if descriptors else None)


def _exactly(sock: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            raise ConnectionResetError("the stream ended within a frame")
        view = view[got:]
    return data


def spooled(record: ArrayRecord | None, folder: Path) -> tuple[int, IO[bytes] | None]:
    """Write Arrays to a nameless file in ``folder``.

    Returns:
        Bytes of the table at the file's begin (of each Array its name, dtype, shape,
        serialisation and bytes), and the file; 0 and None without a record.

    Raises:
        StateError: the folder cannot be written.
    """
    if record is None:
        return 0, None
    table = json.dumps(
        [
            [name, item.dtype, list(item.shape), item.stype, len(item.data)]
            for name, item in record.items()
        ]
    ).encode()
    try:
        file = tempfile.TemporaryFile(prefix=".handover.", dir=folder, buffering=0)
        try:
            for data in (table, *(item.data for item in record.values())):
                rest = memoryview(data)
                while rest:
                    rest = rest[os.write(file.fileno(), rest[:_PIECE]) :]
        except BaseException:
            file.close()
            raise
    except OSError as error:
        raise StateError(
            f"cannot write to {folder}: {error.strerror or error}; free space or mend its "
            "permissions"
        ) from error
    return len(table), file


def read_arrays(table: object, descriptor: int | None) -> ArrayRecord | None:
    """The Arrays of a file that came with a frame.

    Args:
        table: bytes of the file's table, as the frame has it.
        descriptor: the open file.

    Raises:
        WorkerFailed: table and file do not fit; no more than the file holds is
            allocated then.
    """
    if table == 0:
        return None
    total = os.fstat(descriptor).st_size if descriptor is not None else 0
    if descriptor is None or type(table) is not int or not 0 < table <= min(total, MAX_TABLE):
        raise WorkerFailed("a frame with arrays came without their file")
    rows = _rows(_read(descriptor, table, 0))
    if table + sum(size for *_, size in rows) != total:
        raise WorkerFailed("the arrays of a frame do not fill their file")
    record, place = ArrayRecord(), table
    for name, dtype, shape, stype, size in rows:
        record[name] = Array(dtype, shape, stype, _read(descriptor, size, place))
        place += size
    return record


def _rows(text: bytes) -> list[tuple[str, str, tuple[int, ...], str, int]]:
    rows = []
    try:
        for name, dtype, shape, stype, size in json.loads(text):
            if not all(type(each) is str for each in (name, dtype, stype)):
                raise TypeError
            if not all(type(number) is int and number >= 0 for number in (size, *shape)):
                raise TypeError
            rows.append((name, dtype, tuple(shape), stype, size))
    except (TypeError, ValueError, RecursionError):
        raise WorkerFailed("a file of arrays holds a broken table") from None
    return rows


def _read(descriptor: int, size: int, place: int) -> bytes:
    if size <= _PIECE:
        data = os.pread(descriptor, size, place)
        if len(data) == size:
            return data
    pieces = []
    while size:
        piece = os.pread(descriptor, min(size, _PIECE), place)
        if not piece:
            raise WorkerFailed("the arrays of a frame were cut off")
        pieces.append(piece)
        place, size = place + len(piece), size - len(piece)
    return b"".join(pieces)


def values_of(message: Request | Reply) -> dict[str, Any]:
    """All fields of a request or reply but its arrays."""
    return {f.name: getattr(message, f.name) for f in fields(message) if f.name != _ARRAYS}


def request_from(values: object, arrays: ArrayRecord | None) -> Request:
    """Reverse of :func:`values_of`; the ClientApp checked the values.

    Raises:
        WorkerFailed: they are no request's.
    """
    return Request(**_named(values, Request), arrays=arrays)


def reply_from(values: object, arrays: ArrayRecord | None) -> Reply:
    """Reverse of :func:`values_of`.

    Raises:
        WorkerFailed: they are no reply's.
    """
    return Reply(**_named(values, Reply), arrays=arrays)


def _named(values: object, kind: type[Request] | type[Reply]) -> dict[str, Any]:
    wanted = {f.name for f in fields(kind)} - {_ARRAYS}
    if not isinstance(values, dict) or values.keys() != wanted:
        raise WorkerFailed(f"a frame holds no {kind.__name__}; end the site's worker process")
    return values
