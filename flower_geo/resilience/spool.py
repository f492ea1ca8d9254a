"""Replies on disk: accepted, still compressed, read back tensor by tensor.

Nothing keeps a reply in memory once it is spooled, so the coordinator's memory
does not grow with the number of sites, and a reply survives its crash.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from flower_geo.durable import (
    atomic_folder,
    file_sha256,
    read_sealed,
    write_sealed,
    write_tensors,
)
from flower_geo.errors import CheckpointCorrupt

__all__ = ["ReplyMeta", "Spool", "SpooledReply"]


@dataclass(frozen=True)
class ReplyMeta:
    """What is known of a reply besides its tensors.

    Attributes:
        site: the site's name.
        round: the round the site was asked in (its base is ``version``).
        version, base_hash: the model version it trained from.
        kind: ``"weights"`` (absolute) or ``"delta"`` (base minus local).
        weight: tokens, examples or 1, before any discount.
        staleness: rounds between the asking and the folding.
        discount: share of the weight that counts, below 1 for late replies.
        norm: L2 norm of the update.
        fingerprint: training configuration it was computed under.
        metrics: the site's numbers, unchanged.
    """

    site: str
    round: int
    version: int
    base_hash: str
    kind: str
    weight: float
    fingerprint: str
    payload_hash: str
    staleness: int = 0
    discount: float = 1.0
    norm: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class SpooledReply:
    """One reply on disk; blobs are read on demand, memory-mapped."""

    def __init__(self, folder: Path, meta: ReplyMeta) -> None:
        self.folder = folder
        self.meta = meta

    @property
    def weight(self) -> float:
        """Weight in the mean: ``meta.weight * meta.discount``."""
        return self.meta.weight * self.meta.discount

    @property
    def kind(self) -> str:
        """``"weights"`` or ``"delta"``."""
        return self.meta.kind

    def names(self) -> list[str]:
        """Names of the tensors in the reply."""
        with self._open() as file:
            return list(file.keys())

    def blob(self, name: str) -> bytes:
        """Encoded bytes of one tensor."""
        with self._open() as file:
            return bytes(file.get_tensor(name).numpy().tobytes())

    @contextmanager
    def _open(self) -> Iterator[Any]:
        try:
            with safe_open(self.folder / "blobs.safetensors", framework="pt") as file:
                yield file
        except (OSError, SafetensorError) as error:
            raise CheckpointCorrupt(
                f"the spooled reply {self.folder} cannot be read ({error}); run again: its site "
                "is then asked anew"
            ) from error


class Spool:
    """The ``spool/`` folder of a run, a folder a round and a site.

    Replies that an earlier process stored are read through and compared with
    their hash once, before they are used.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._verified: set[tuple[int, str]] = set()

    def _round(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}"

    def put(self, round: int, meta: ReplyMeta, blobs: Mapping[str, bytes]) -> SpooledReply:
        """Store a reply for folding in ``round``; replaces one of the same site.

        Raises:
            StateError: the disk is full or not writable.
        """
        target = self._round(round) / meta.site
        with atomic_folder(target) as scratch:
            digest = write_tensors(
                scratch / "blobs.safetensors",
                # A view over the bytes: blobs of a large model are not copied here.
                {
                    name: torch.frombuffer(bytearray(blob), dtype=torch.uint8)
                    for name, blob in blobs.items()
                },
            )
            write_sealed(scratch / "reply.json", {"meta": asdict(meta), "sha256": digest})
        self._verified.add((round, meta.site))
        return SpooledReply(target, meta)

    def replies(self, round: int) -> list[SpooledReply]:
        """Replies spooled for ``round``, sorted by site name.

        The order is the site's name, not arrival, so that a fold of the same
        replies gives the same bits however the network behaved.
        """
        return sorted(self._read(round), key=lambda reply: reply.meta.site)

    def _read(self, round: int) -> Iterator[SpooledReply]:
        folder = self._round(round)
        if not folder.is_dir():
            return
        for entry in folder.iterdir():
            if entry.name.startswith("."):
                continue
            try:
                stored = read_sealed(entry / "reply.json")
                meta = ReplyMeta(**stored["meta"])
                whole = meta.site == entry.name and self._is_whole(round, entry, stored["sha256"])
            except (CheckpointCorrupt, KeyError, TypeError, OSError):
                whole = False
            if whole:
                yield SpooledReply(entry, meta)
            else:
                # Unreadable is as good as never arrived: the site is asked again.
                shutil.rmtree(entry, ignore_errors=True)

    def _is_whole(self, round: int, entry: Path, digest: str) -> bool:
        blobs = entry / "blobs.safetensors"
        if (round, entry.name) not in self._verified:
            if file_sha256(blobs) != digest:
                return False
            self._verified.add((round, entry.name))
        return blobs.is_file()

    def holds(self, round: int, site: str) -> bool:
        """Whether a reply of this site is spooled for ``round``."""
        return (self._round(round) / site / "reply.json").is_file()

    def drop(self, round: int, site: str) -> None:
        """Forget one reply."""
        shutil.rmtree(self._round(round) / site, ignore_errors=True)
        self._verified.discard((round, site))

    def clear(self, up_to: int) -> None:
        """Remove every round's replies up to and including ``up_to``."""
        if not self.folder.is_dir():
            return
        for entry in self.folder.iterdir():
            name = entry.name.removeprefix("round-")
            if name.isdigit() and int(name) <= up_to:
                shutil.rmtree(entry, ignore_errors=True)
        self._verified = {key for key in self._verified if key[0] > up_to}

    def size(self, round: int) -> int:
        """Bytes on disk of a round's replies."""
        return sum(p.stat().st_size for p in self._round(round).rglob("*.safetensors"))
