"""Snapshots of the cloud's half within a round, and its end.

    <folder>/<label>/step-000120/{half.safetensors, step.json}

A label hashes all that a round depends on, so that a round goes on from steps of its
own only.  Two steps are kept, as at the sites: whoever dies, there is one that all have.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
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

__all__ = ["HalfStore"]

logger = logging.getLogger(__name__)

_TENSORS, _STEP = "half.safetensors", "step.json"


class HalfStore:
    """The snapshots of one group of sites in one round.

    Args:
        folder: of all rounds.
        label: of this one.
        keep: snapshots kept, the newest.
    """

    def __init__(self, folder: Path, label: str, keep: int = 2) -> None:
        self._folder = folder / label
        self._keep = keep

    def steps(self) -> list[int]:
        """Steps that can be gone back to, newest first."""
        found = (path.name.removeprefix("step-") for path in self._folder.glob("step-*"))
        return sorted((int(name) for name in found if name.isdigit()), reverse=True)

    def load(self, step: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and JSON state of a step; None where it is damaged or not there."""
        folder = self._path(step)
        try:
            state = read_sealed(folder / _STEP)
            return read_tensors(folder / _TENSORS, str(state["file"])), dict(state["state"])
        except (CheckpointCorrupt, KeyError, TypeError, ValueError) as error:
            if folder.exists():
                logger.warning("a snapshot of the cloud's half cannot be gone on from: %s", error)
            return None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> bool:
        """Add a snapshot and drop the oldest; False when the disk does not take it."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_folder(self._path(step)) as scratch:
                file = write_tensors(scratch / _TENSORS, dict(tensors))
                write_sealed(scratch / _STEP, {"file": file, "state": dict(state)})
        except (StateError, OSError) as error:
            logger.warning("no snapshot of the cloud's half: %s", error)
            return False
        for old in self.steps()[self._keep :]:
            shutil.rmtree(self._path(old), ignore_errors=True)
        return True

    def back_to(self, step: int) -> None:
        """Drop what came after ``step``."""
        for later in self.steps():
            if later > step:
                shutil.rmtree(self._path(later), ignore_errors=True)

    def drop_others(self, *labels: str) -> None:
        """Remove what other rounds left; ``labels`` and this one's stay."""
        kept = {self._folder.name, *labels}
        for path in self._folder.parent.glob("*"):
            if path.is_dir() and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"
