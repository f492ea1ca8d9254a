"""Writes that are either whole or absent, and locks that die with their owner."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from flower_geo.errors import CheckpointCorrupt, StateError, StateLocked

__all__ = [
    "FileLock",
    "atomic_folder",
    "file_sha256",
    "fsync_path",
    "read_json",
    "read_tensors",
    "write_bytes",
    "write_json",
    "write_tensors",
]

PRIVATE = 0o600


def fsync_path(path: Path) -> None:
    """Flush a file or a folder's entries to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def file_sha256(path: Path) -> str:
    """Hex digest of a file, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_bytes(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` so that a crash leaves the old or the new file.

    Raises:
        StateError: the folder cannot be written (full, read-only, no access).
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(name, PRIVATE)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
        fsync_path(path.parent)
    except OSError as error:
        raise StateError(
            f"cannot write {path}: {error.strerror or error}; free space or mend its permissions"
        ) from error


def write_json(path: Path, value: Any) -> None:
    """Atomically write ``value`` as indented JSON."""
    write_bytes(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        CheckpointCorrupt: it is missing or not JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors as safetensors, flushed to disk, mode 0600; return the file's sha256.

    Not atomic by itself: use it inside :func:`atomic_folder`.
    """
    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    path.chmod(PRIVATE)
    fsync_path(path)
    return file_sha256(path)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a safetensors file, memory-mapped, in the file's own order of names.

    Raises:
        CheckpointCorrupt: the file is missing, cut or not safetensors.
    """
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Fill a temporary folder, then put it in ``target``'s place in one rename.

    An existing ``target`` is moved aside first and removed after; readers see
    the old folder, or the new one, or (for the moment between two renames)
    none, never a half-written one.

    Raises:
        StateError: the disk is full or the folder cannot be written.
    """
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield scratch
        fsync_path(scratch)
        aside = None
        if target.exists():
            aside = Path(tempfile.mkdtemp(prefix=f".old-{target.name}.", dir=target.parent))
            os.replace(target, aside / "old")
        os.replace(scratch, target)
        fsync_path(target.parent)
        if aside is not None:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise StateError(
            f"cannot write {target}: {getattr(error, 'strerror', None) or error}; "
            "free space or mend its permissions"
        ) from error
    finally:
        if scratch is not None and scratch.exists():
            shutil.rmtree(scratch, ignore_errors=True)


class FileLock:
    """An exclusive lock on a file, released by the kernel when the holder dies.

    The file holds the owner's pid for people; the lock itself is ``flock``, so
    a file left behind by a killed process locks nothing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._handle: int | None = None

    def acquire(self, what: str) -> None:
        """Take the lock or raise ``StateLocked`` naming ``what`` and the owner's pid."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path, os.O_RDWR | os.O_CREAT, PRIVATE)
        except OSError as error:
            raise StateError(
                f"cannot use {self.path.parent}: {error.strerror or error}; "
                "choose a folder that can be written"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            owner = os.read(handle, 32).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise StateLocked(
                f"{what} is in use by process {owner} ({self.path}); "
                "wait for it, end it, or choose another name"
            ) from None
        os.ftruncate(handle, 0)
        os.write(handle, f"{os.getpid()}\n".encode())
        self._handle = handle

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
