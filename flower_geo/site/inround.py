"""Snapshots within a round: a site that dies in it goes on from the newest.

    <state-dir>/<run-name>-<uid>/<site>/
      snapshot/{weights,inner}.safetensors, snapshot.json
      snapshot-before/      the one before it, where two are kept

A snapshot's label hashes all that the steps depend on, so that a round goes on
from steps of its own only; a round that goes on ends with the very bits of one
that was never broken off.  Two are kept where a round is one of several parties,
which may have to go back to a step that all of them still have.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_geo.durable import (
    atomic_folder,
    read_sealed,
    read_tensors,
    write_sealed,
    write_tensors,
)
from flower_geo.errors import CheckpointCorrupt, StateError
from flower_geo.training import RoundSoFar

__all__ = ["Pace", "RoundSnapshot", "RoundSnapshots", "label_of"]

logger = logging.getLogger(__name__)

#: Raised by one whenever an older snapshot cannot be gone on from.
_VERSION = 1
#: A snapshot may take this share of the time since the one before ...
_SHARE = 0.05
#: ... but none is put off for longer than this, in seconds.
_LONGEST = 300.0
#: First guess of what a snapshot takes: seconds at least, and bytes a second.
_LEAST, _SPEED = 0.01, 500e6

_PARTS = ("weights", "inner")


@dataclass(frozen=True)
class RoundSnapshot:
    """A round between two of its steps.

    Attributes:
        so_far: steps done and what they counted.
        consumed: sequences of the site's data used up by then.
        weights: of the model.
        inner: optimizer state and RNG, flat.
        metrics: measured before the first step.
    """

    so_far: RoundSoFar
    consumed: int
    weights: dict[str, Tensor]
    inner: dict[str, Tensor]
    metrics: dict[str, float] = field(default_factory=dict)


def label_of(*deciding: Any) -> str:
    """Hash of JSON values: everything the steps of a round depend on."""
    return hashlib.sha256(json.dumps([_VERSION, *deciding], sort_keys=True).encode()).hexdigest()


class RoundSnapshots:
    """The snapshots of one site and run; for the holder of the state folder's lock.

    Args:
        folder: the site's state folder.
        label: of the round at work.
        keep: snapshots kept, 1 or 2.
    """

    def __init__(self, folder: Path, label: str, keep: int = 1) -> None:
        self._folder = folder / "snapshot"
        self._before = folder / "snapshot-before"
        self._label = label
        self._keep = keep

    def load(self, step: int | None = None) -> RoundSnapshot | None:
        """This round's snapshot after ``step``, or the newest; None where there is no whole one."""
        whole = (found for _, found in self._whole() if step in (None, found.so_far.steps))
        return next(whole, None)

    def steps(self) -> list[int]:
        """Steps of this round that can be gone back to, newest first; its begin is not told."""
        return [found.so_far.steps for _, found in self._whole()]

    def _whole(self) -> Iterator[tuple[Path, RoundSnapshot]]:
        """Whole snapshots of this round and where they lie, newest first."""
        for folder in (self._folder, self._before):
            if (found := self._read(folder)) is not None:
                yield folder, found

    def _read(self, folder: Path) -> RoundSnapshot | None:
        try:
            meta = read_sealed(folder / "snapshot.json")
            if meta["label"] != self._label:
                return None
            tensors = {
                part: read_tensors(folder / f"{part}.safetensors", str(meta["files"][part]))
                for part in _PARTS
            }
            return RoundSnapshot(
                so_far=RoundSoFar(**meta["so_far"]), consumed=int(meta["consumed"]),
                metrics=dict(meta["metrics"]), **tensors,
            )  # fmt: skip
        except (CheckpointCorrupt, KeyError, TypeError, ValueError) as error:
            if folder.exists():
                logger.warning("a snapshot within the round cannot be gone on from: %s", error)
            return None

    def save(self, snapshot: RoundSnapshot) -> bool:
        """Add a snapshot and drop the oldest; False when the disk does not take it.

        Training can go on without one, so that is no error here: a disk that is
        really full fails the round when its result is stored.
        """
        try:
            if self._keep > 1 and self._folder.exists():
                shutil.rmtree(self._before, ignore_errors=True)
                self._folder.rename(self._before)
            with atomic_folder(self._folder) as scratch:
                files = {
                    part: write_tensors(scratch / f"{part}.safetensors", getattr(snapshot, part))
                    for part in _PARTS
                }
                write_sealed(
                    scratch / "snapshot.json",
                    {
                        "label": self._label, "so_far": asdict(snapshot.so_far),
                        "consumed": snapshot.consumed, "metrics": snapshot.metrics,
                        "files": files,
                    },
                )  # fmt: skip
        except (StateError, OSError) as error:
            logger.warning("no snapshot within the round: %s", error)
            return False
        return True

    def back_to(self, step: int) -> RoundSnapshot | None:
        """Drop what came after ``step``; return the snapshot of that step, None at the begin.

        Raises:
            StateError: there is no snapshot of that step.
        """
        wanted: RoundSnapshot | None = None
        for folder, found in self._whole():
            if found.so_far.steps > step:
                shutil.rmtree(folder, ignore_errors=True)
            elif found.so_far.steps == step:
                wanted = wanted or found
        if step and wanted is None:
            raise StateError(
                f"the round cannot go back to step {step}: its snapshot is gone from "
                f"{self._folder.parent}; the round starts anew when it is asked for again"
            )
        return wanted

    def drop(self) -> None:
        """Remove the snapshots, of whatever round."""
        for folder in (self._folder, self._before):
            shutil.rmtree(folder, ignore_errors=True)


class Pace:
    """When a snapshot is due.

    Every so many steps, unless those went by so fast that the snapshot would
    cost more than a twentieth of their time; then at a later multiple.

    Args:
        every: steps between snapshots; 0 = none.
        nbytes: about what one writes.
    """

    def __init__(self, every: int, nbytes: int) -> None:
        self._every = every
        self._cost = _LEAST + nbytes / _SPEED
        self._since = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether to write one after ``step`` steps."""
        if not self._every or step % self._every:
            return False
        return time.monotonic() - self._since >= min(self._cost / _SHARE, _LONGEST)

    def wrote(self, began: float) -> None:
        """One was written, begun at that moment of ``time.monotonic``."""
        self._since = time.monotonic()
        self._cost = self._since - began
