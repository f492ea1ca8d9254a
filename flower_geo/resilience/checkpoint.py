"""Checkpoints of a run: committed in one rename, verified before use.

A checkpoint is a folder ``round-000012`` of safetensors files and a
``state.json`` that names each file's sha256.  It appears by a rename, so it is
whole or absent; a disk that lost or changed bytes afterwards is found by the
hashes, and the checkpoint before it is used.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_geo.durable import (
    atomic_folder,
    fsync_path,
    read_sealed,
    read_tensors,
    write_sealed,
    write_tensors,
)
from flower_geo.errors import CheckpointCorrupt, StateError

__all__ = ["BackgroundWriter", "Checkpoint", "CheckpointStore"]

logger = logging.getLogger(__name__)

FORMAT = 1
_NAME = re.compile(r"round-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        round: committed rounds it stands for (0 = the initial model).
        tensors: group name -> tensor name -> tensor.
        state: the JSON state saved beside them.
    """

    round: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class CheckpointStore:
    """The ``checkpoints/`` folder of a run."""

    def __init__(self, folder: Path, keep: int = 3) -> None:
        self.folder = folder
        self.keep = keep

    def path(self, round: int) -> Path:
        """Folder of the checkpoint after ``round`` commits."""
        return self.folder / f"round-{round:06d}"

    def rounds(self) -> list[int]:
        """Rounds with a checkpoint folder, ascending; not verified."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def save(
        self,
        round: int,
        tensors: Mapping[str, Mapping[str, Tensor]],
        state: Mapping[str, Any],
    ) -> Path:
        """Commit a checkpoint and remove the oldest beyond ``keep``.

        Two groups that are the same object are stored once and linked.

        Raises:
            StateError: the disk is full or not writable; older checkpoints
                are untouched.
        """
        target = self.path(round)
        with atomic_folder(target) as scratch:
            hashes: dict[str, str] = {}
            written: dict[int, str] = {}
            for group, values in tensors.items():
                name = f"{group}.safetensors"
                twin = written.get(id(values))
                if twin is not None:
                    os.link(scratch / twin, scratch / name)
                    hashes[name] = hashes[twin]
                else:
                    hashes[name] = write_tensors(scratch / name, values)
                    written[id(values)] = name
            write_sealed(
                scratch / "state.json",
                {"format": FORMAT, "round": round, "files": hashes, "state": dict(state)},
            )
        for old in self.rounds()[: -self.keep]:
            shutil.rmtree(self.path(old), ignore_errors=True)
        return target

    def load(self, round: int) -> Checkpoint:
        """Read and verify one checkpoint.

        Raises:
            CheckpointCorrupt: a file is missing or not what was written.
        """
        folder = self.path(round)
        meta = read_sealed(folder / "state.json")
        try:
            if meta["format"] != FORMAT or meta["round"] != round:
                raise CheckpointCorrupt(f"{folder} is of another format or round")
            files, state = dict(meta["files"]), dict(meta["state"])
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointCorrupt(f"{folder}/state.json lacks {error}") from error
        tensors = {}
        for name, expected in files.items():
            path = folder / name
            if path.parent != folder:
                raise CheckpointCorrupt(f"{path} is no file of {folder}")
            tensors[path.stem] = read_tensors(path, str(expected))
        return Checkpoint(round, tensors, state)

    def newest(self) -> Checkpoint | None:
        """Newest checkpoint that verifies, or None; damaged ones are named in the log."""
        for round in reversed(self.rounds()):
            try:
                return self.load(round)
            except CheckpointCorrupt as error:
                logger.warning("checkpoint of round %d skipped: %s", round, error)
                self._set_aside(round)
        return None

    def _set_aside(self, round: int) -> None:
        damaged = self.path(round).with_name(f"damaged-{round:06d}")
        shutil.rmtree(damaged, ignore_errors=True)
        try:
            os.replace(self.path(round), damaged)
            fsync_path(self.folder)
        except OSError as error:
            raise StateError(
                f"cannot move {self.path(round)} aside: {error.strerror or error}; remove it"
            ) from error


class BackgroundWriter:
    """Runs one commit at a time beside the next round; never more than one behind.

    An error of a commit is raised by the next :meth:`submit` or :meth:`wait`,
    so that a full disk stops the run instead of passing unseen.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Wait for the commit before, then start ``work``."""
        self.wait()

        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=run, name="flower-geo-commit")
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is being written; raise what the last commit raised."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error
