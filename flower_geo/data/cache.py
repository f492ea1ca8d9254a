"""Prepared tokens on disk: written whole or not at all, checked whenever opened.

    CACHE/
      KEY/               KEY hashes all that decides the tokens
        train.bin        token ids, little-endian
        held_out.bin
        meta.json        counts and sha256 of both, dtype, how they were parted

Processes that prepare the same text at once each build their own copy in a
temporary folder; the first to rename it wins and the others use that one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flower_geo.data.corpus import Tokens
from flower_geo.errors import DataError

__all__ = ["VERSION", "Prepared", "kept", "open_or_build"]

_LOG = logging.getLogger(__name__)

#: Raise it when the same text would be packed otherwise than before.
VERSION = 1

_TEMPORARY = ".tmp-"
_ABANDONED_SECONDS = 24 * 3600.0

_Opened = TypeVar("_Opened")


@dataclass(frozen=True)
class Prepared:
    """Both token streams of a whole source, memory-mapped, and their sha256."""

    train: Tokens
    held_out: Tokens
    sha256: tuple[str, str]


class _Damaged(Exception):
    """An entry does not hold what it claims."""


def open_or_build(
    cache_dir: Path, key: str, dtype: np.dtype[Any], build: Callable[[Path], str]
) -> Prepared:
    """Open entry `key`, building it when it is missing or damaged.

    Args:
        cache_dir: folder of all entries; made when missing, for this user only.
        key: file-name-safe name of the entry.
        dtype: type of the token ids.
        build: writes ``train.bin`` and ``held_out.bin`` into the folder it is
            given and returns a word on how.

    Raises:
        DataError: the folder cannot be written, or what `build` raises.
    """

    def fill(folder: Path) -> None:
        meta: dict[str, Any] = {"version": VERSION, "dtype": dtype.str, "parted": build(folder)}
        for part in ("train", "held_out"):
            with (folder / f"{part}.bin").open("rb") as handle:
                digest = hashlib.file_digest(handle, "sha256").hexdigest()
                os.fsync(handle.fileno())
                count = handle.tell() // dtype.itemsize
            meta[part] = {"tokens": count, "sha256": digest}
        with (folder / "meta.json").open("w", encoding="utf-8") as text:
            json.dump(meta, text, indent=1)
            text.flush()
            os.fsync(text.fileno())

    return kept(cache_dir, key, lambda entry: _open(entry, dtype), fill)


def kept(
    cache_dir: Path,
    key: str,
    opened: Callable[[Path], _Opened | None],
    fill: Callable[[Path], None],
) -> _Opened:
    """Open entry `key` of any kind, building it when it is missing or damaged.

    Args:
        cache_dir: folder of all entries; made when missing, for this user only.
        key: file-name-safe name of the entry.
        opened: opens a finished folder; None when it is not there or not whole.
        fill: writes all of the entry, flushed, into the folder it is given.

    Raises:
        DataError: the folder cannot be written, or what `fill` raises.
    """
    entry = cache_dir / key
    try:
        found = opened(entry)
        return _build(cache_dir, entry, opened, fill) if found is None else found
    except OSError as error:
        raise DataError(
            f"cannot write the data cache {cache_dir}: {error.strerror or error}; free space "
            "there or choose a writable folder"
        ) from error


def _open(entry: Path, dtype: np.dtype[Any]) -> Prepared | None:
    """The entry, or None when it is not there or not whole."""
    try:
        meta = json.loads((entry / "meta.json").read_bytes())
        arrays, sums = [], []
        for part in ("train", "held_out"):
            tokens: Tokens = np.memmap(entry / f"{part}.bin", dtype=dtype, mode="r")
            # Checked through the mapping, so that what is used is what was checked.
            digest = hashlib.sha256(tokens.data).hexdigest()
            if meta[part] != {"tokens": tokens.size, "sha256": digest}:
                raise _Damaged(f"{part}.bin")
            arrays.append(tokens)
            sums.append(digest)
        if meta["version"] != VERSION or meta["dtype"] != dtype.str:
            raise _Damaged("meta.json")
    except (FileNotFoundError, NotADirectoryError) as error:
        if entry.exists():
            _LOG.warning("data cache %s is incomplete (%s): building it anew", entry, error)
        return None
    except (_Damaged, ValueError, KeyError, TypeError) as error:
        _LOG.warning("data cache %s is damaged (%s): building it anew", entry, error)
        return None
    return Prepared(arrays[0], arrays[1], (sums[0], sums[1]))


def _build(
    cache_dir: Path,
    entry: Path,
    opened: Callable[[Path], _Opened | None],
    fill: Callable[[Path], None],
) -> _Opened:
    cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    _sweep(cache_dir)
    # mkdtemp makes a folder that only this user can enter: tokens are the site's text.
    folder = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=cache_dir))
    try:
        fill(folder)
        # Mapped before it is renamed: what others do to the entry cannot touch it any more.
        mine = opened(folder)
        if mine is None:
            raise OSError(f"{folder.name} does not keep what is written to it")
        theirs = _put(folder, entry, opened)
        return mine if theirs is None else theirs
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put(folder: Path, entry: Path, opened: Callable[[Path], _Opened | None]) -> _Opened | None:
    """Rename the finished folder to its place, unless a whole entry is there: return that."""
    try:
        folder.rename(entry)
        return None
    except OSError:
        if not entry.exists():
            raise
    theirs = opened(entry)
    if theirs is not None:
        return theirs
    # Moved aside first: readers that have it mapped keep their pages.
    grave = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=entry.parent))
    try:
        # Either rename may lose to another process; this one has its own copy mapped.
        with contextlib.suppress(OSError):
            entry.rename(grave / "damaged")
            folder.rename(entry)
    finally:
        shutil.rmtree(grave, ignore_errors=True)
    return None


def _sweep(cache_dir: Path) -> None:
    """Remove what killed processes left half-built a day or more ago."""
    for path in cache_dir.glob(f"{_TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
