"""A site's durable state of one run: base weights and generations.

A *generation* is everything a site has after training a round: inner
optimizer, residual of error feedback, data cursor, and the reply it sent.  The
coordinator names in each request the newest round whose update it folded in;
the site goes on from that generation and from no other.  So an update that was
lost, late or refused rolls back by itself, and a coordinator that restarts
from an older checkpoint finds the site's state of that time.

    <state-dir>/<run-name>-<uid>/<site>/
      lock
      base/{weights.safetensors, base.json}
      gen-000003/{inner,residual,personal,reply,alone}.safetensors, state.json
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from flower_geo.durable import (
    FileLock,
    atomic_folder,
    read_sealed,
    read_tensors,
    remove_unfinished,
    write_sealed,
    write_tensors,
)
from flower_geo.errors import CheckpointCorrupt, StateError

__all__ = ["Generation", "SiteState"]

_NAME = re.compile(r"gen-(\d{6,})")
#: Tensors of a generation, a file each.
_GROUPS = ("inner", "residual", "personal", "reply", "alone")

#: Those every generation has; the others only where there is something in them.
_ALWAYS = _GROUPS[:4]

#: Forebears kept of the accepted generation: a coordinator may come back from
#: an earlier checkpoint than the newest.
KEEP_OLDER = 2
#: Generations kept that are newer than the accepted one; their replies may still
#: be on the way.
KEEP_NEWER = 3


@dataclass
class Generation:
    """State after training ``round`` (0 = before the first).

    Attributes:
        round: the round trained.
        parent: the round whose generation it went on from; 0 = from the start.
        key: what the reply answers: (base hash, fingerprint).
        consumed: training sequences used up so far.
        inner: optimizer state and RNG, flat.
        residual: error feedback after this round's update.
        personal: trained tensors that stay at the site.
        reply: encoded tensors of the reply as uint8, and its fields.
        alone: weights and inner state of the site's training by itself, flat.
    """

    round: int = 0
    parent: int = 0
    key: tuple[str, str] = ("", "")
    consumed: int = 0
    inner: dict[str, Tensor] = field(default_factory=dict)
    residual: dict[str, Tensor] = field(default_factory=dict)
    personal: dict[str, Tensor] = field(default_factory=dict)
    reply: dict[str, Tensor] = field(default_factory=dict)
    alone: dict[str, Tensor] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


class SiteState:
    """The state folder of one site in one run; a context manager that holds its lock."""

    def __init__(self, root: Path, run_name: str, run_uid: str, site: str) -> None:
        self.folder = root / f"{run_name}-{run_uid}" / site
        self._lock = FileLock(self.folder / "lock")
        self._site = site

    def __enter__(self) -> SiteState:
        """Take the lock.

        Raises:
            StateLocked: another process works for this site and run.
            StateError: the folder cannot be written.
        """
        self._lock.acquire(f"the state of site '{self._site}'")
        try:
            self.folder.chmod(0o700)
            remove_unfinished(self.folder)
        except OSError as error:
            self._lock.release()
            raise StateError(
                f"cannot use {self.folder}: {error.strerror or error}; mend its permissions"
            ) from error
        return self

    def __exit__(self, *_: object) -> None:
        """Give the lock back."""
        self._lock.release()

    # -- base weights ---------------------------------------------------------

    def base(self) -> tuple[int, str]:
        """Version and content hash of the stored base, (-1, "") when there is none."""
        try:
            meta = read_sealed(self.folder / "base" / "base.json")
            return int(meta["version"]), str(meta["hash"])
        except (CheckpointCorrupt, KeyError, TypeError, ValueError):
            return -1, ""

    def load_base(self) -> dict[str, Tensor] | None:
        """Base weights, or None when they are missing or damaged."""
        try:
            meta = read_sealed(self.folder / "base" / "base.json")
            return read_tensors(self.folder / "base" / "weights.safetensors", str(meta["sha256"]))
        except (CheckpointCorrupt, KeyError, TypeError):
            return None

    def save_base(self, version: int, content_hash: str, weights: Mapping[str, Tensor]) -> None:
        """Replace the base."""
        with atomic_folder(self.folder / "base") as scratch:
            digest = write_tensors(scratch / "weights.safetensors", weights)
            write_sealed(
                scratch / "base.json",
                {"version": version, "hash": content_hash, "sha256": digest},
            )

    def drop_base(self) -> None:
        """Forget a base that is no good, so that the site does not claim to hold it."""
        shutil.rmtree(self.folder / "base", ignore_errors=True)

    # -- generations ----------------------------------------------------------

    def generations(self) -> list[int]:
        """Rounds with a stored generation, ascending."""
        if not self.folder.is_dir():
            return []
        found = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in found if match)

    def _path(self, round: int) -> Path:
        return self.folder / f"gen-{round:06d}"

    def load(self, round: int) -> Generation | None:
        """One generation, or None when it is missing or damaged."""
        folder = self._path(round)
        try:
            meta = read_sealed(folder / "state.json")
            if meta["round"] != round:
                return None
            groups = {
                name: read_tensors(folder / f"{name}.safetensors", str(meta["files"][name]))
                for name in _GROUPS
                if name in _ALWAYS or name in meta["files"]
            }
            first, second = meta["key"]
            return Generation(
                round=round, parent=int(meta["parent"]), key=(str(first), str(second)),
                consumed=int(meta["consumed"]), fields=dict(meta["fields"]), **groups,
            )  # fmt: skip
        except (CheckpointCorrupt, KeyError, TypeError, ValueError):
            return None

    def save(self, generation: Generation) -> None:
        """Store a generation."""
        with atomic_folder(self._path(generation.round)) as scratch:
            files = {
                name: write_tensors(scratch / f"{name}.safetensors", getattr(generation, name))
                for name in _GROUPS
                if name in _ALWAYS or getattr(generation, name)
            }
            write_sealed(
                scratch / "state.json",
                {
                    "round": generation.round, "parent": generation.parent,
                    "key": list(generation.key),
                    "consumed": generation.consumed, "fields": generation.fields,
                    "files": files,
                },
            )  # fmt: skip

    def prune(self, accepted: int) -> None:
        """Remove generations no coordinator can ask for any more.

        A coordinator names accepted rounds only, so of the older generations
        those are kept that the accepted one came from; the updates of others
        were lost.
        """
        stored = self.generations()
        newer = [round for round in stored if round > accepted]
        kept = {accepted, *newer[-KEEP_NEWER:]}
        forebear = accepted
        for _ in range(KEEP_OLDER):
            forebear = self._parent(forebear)
            kept.add(forebear)
        if accepted not in stored:
            # Its forebears are not known any more.
            kept.update([round for round in stored if round < accepted][-KEEP_OLDER:])
        for round in set(stored) - kept:
            shutil.rmtree(self._path(round), ignore_errors=True)

    def _parent(self, round: int) -> int:
        try:
            return int(read_sealed(self._path(round) / "state.json")["parent"])
        except (CheckpointCorrupt, KeyError, TypeError, ValueError):
            return 0
