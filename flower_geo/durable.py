"""Writes that are either whole or absent, and locks that die with their owner."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from flower_geo.errors import CheckpointCorrupt, StateError, StateLocked

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "FileLock",
    "atomic_folder",
    "file_sha256",
    "fsync_path",
    "read_json",
    "read_sealed",
    "read_tensors",
    "remove_unfinished",
    "write_bytes",
    "write_json",
    "write_sealed",
    "write_tensors",
]

PRIVATE = 0o600
#: Where a folder lies while another takes its place.
_ASIDE = ".old-"
#: Temporary names: tempfile's eight letters after the name it is for.
_UNFINISHED = re.compile(r"\.(?P<aside>old-)?(?P<name>.+)\.[a-z0-9_]{8}")


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
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error


def write_sealed(path: Path, value: Mapping[str, Any]) -> None:
    """Like :func:`write_json`, with a ``seal``: a hash of the rest."""
    write_json(path, {**value, "seal": _seal(value)})


def read_sealed(path: Path) -> dict[str, Any]:
    """Read what :func:`write_sealed` wrote, without its seal.

    Raises:
        CheckpointCorrupt: it is missing, or not to the last digit what was written.
    """
    value = read_json(path)
    if not isinstance(value, dict) or value.pop("seal", None) != _seal(value):
        raise CheckpointCorrupt(f"{path} is not what was written")
    return value


def _seal(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write tensors as safetensors, flushed to disk, mode 0600; return the file's sha256.

    Not atomic by itself: use it inside :func:`atomic_folder`.
    """
    # Who only locks and writes JSON is spared torch.
    from safetensors.torch import save_file

    save_file(
        {name: tensor.detach().contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )
    path.chmod(PRIVATE)
    fsync_path(path)
    return file_sha256(path)


def read_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Read a safetensors file, memory-mapped, in the file's own order of names.

    Args:
        path: the file.
        sha256: what :func:`write_tensors` gave for it; None = take it as it is.

    Raises:
        CheckpointCorrupt: the file is missing, cut, not safetensors, or not what
            was written.
    """
    try:
        if sha256 is not None and file_sha256(path) != sha256:
            raise CheckpointCorrupt(f"{path} is not what was written")
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointCorrupt(f"{path} cannot be read: {error}") from error


@contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Fill a temporary folder, then put it in ``target``'s place in one rename.

    An existing ``target`` is moved aside first and removed after; readers see
    the old folder, or the new one, or (for the moment between two renames)
    none, never a half-written one.  :func:`remove_unfinished` puts back the old
    one when a crash fell into that moment.

    Raises:
        StateError: the disk is full or the folder cannot be written.
    """
    scratch: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        yield scratch
        fsync_path(scratch)
        if target.exists():
            _exchange(scratch, target)
        else:
            os.replace(scratch, target)
        fsync_path(target.parent)
    except (OSError, SafetensorError) as error:
        raise StateError(
            f"cannot write {target}: {getattr(error, 'strerror', None) or error}; "
            "free space or mend its permissions"
        ) from error
    finally:
        if scratch is not None and scratch.exists():
            shutil.rmtree(scratch, ignore_errors=True)


def _exchange(scratch: Path, target: Path) -> None:
    aside = Path(tempfile.mkdtemp(prefix=f"{_ASIDE}{target.name}.", dir=target.parent))
    try:
        os.replace(target, aside / "old")
        try:
            os.replace(scratch, target)
        except OSError:
            os.replace(aside / "old", target)
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def remove_unfinished(folder: Path, name: str = "") -> None:
    """Remove what writers that were killed left in ``folder``; put back what they had set aside.

    Only for the holder of the folder's lock: a living writer's temporary files
    look the same.

    Args:
        folder: where files and folders are written.
        name: look only for what was to become this one; "" = all.
    """
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        found = _UNFINISHED.fullmatch(entry.name)
        if found is None or name not in ("", found["name"]):
            continue
        target = folder / found["name"]
        with suppress(OSError):
            if entry.is_symlink() or not entry.is_dir():
                entry.unlink()
                continue
            if found["aside"] and not target.exists():
                os.replace(entry / "old", target)
        shutil.rmtree(entry, ignore_errors=True)


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
        except BlockingIOError:
            os.close(handle)
            raise StateLocked(
                f"{what} is in use by process {self.owner()} ({self.path}); "
                "wait for it, end it, or choose another name"
            ) from None
        except OSError as error:
            os.close(handle)
            raise StateError(
                f"{self.path} cannot be locked: {error.strerror or error}; "
                "choose a folder on a file system with locks"
            ) from error
        # The pid is for people; a full disk must not cost the lock.
        with suppress(OSError):
            os.ftruncate(handle, 0)
            os.write(handle, f"{os.getpid()}\n".encode())
        self._handle = handle
        _held.add(self)

    def owner(self) -> str:
        """The pid its newest holder wrote, for people; ``unknown`` where there is none."""
        with suppress(OSError), self.path.open("rb") as file:
            return file.read(32).decode(errors="replace").strip() or "unknown"
        return "unknown"

    def release(self) -> None:
        """Give the lock back; a second call does nothing."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
            _held.discard(self)


#: Locks this process holds.
_held: weakref.WeakSet[FileLock] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    """In a forked child: close the copies of the locks.

    The kernel keeps a lock for as long as any copy of its descriptor is open,
    so a child that lives on would hold its parent's locks.
    """
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_let_go_after_fork)
