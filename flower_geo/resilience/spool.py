"""Replies on disk: accepted, still compressed, read back tensor by tensor.

Nothing keeps a reply in memory once it is spooled, so the coordinator's memory
does not grow with the number of sites, and a reply survives its crash.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from flower_geo.durable import atomic_folder, read_json, write_json, write_tensors
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
        weight: tokens, examples or 1, before any staleness factor.
        staleness: rounds between the asking and the folding.
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
    metrics: dict[str, float] = field(default_factory=dict)


class SpooledReply:
    """One reply on disk; blobs are read on demand, memory-mapped."""

    def __init__(self, folder: Path, meta: ReplyMeta) -> None:
        self.folder = folder
        self.meta = meta

    @property
    def weight(self) -> float:
        """Weight in the mean: ``meta.weight / (1 + staleness)``."""
        return self.meta.weight / (1 + self.meta.staleness)

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

    def _open(self) -> Any:
        try:
            return safe_open(self.folder / "blobs.safetensors", framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointCorrupt(f"{self.folder} cannot be read: {error}") from error


class Spool:
    """The ``spool/`` folder of a run, a folder a round and a site."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _round(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}"

    def put(self, round: int, meta: ReplyMeta, blobs: Mapping[str, bytes]) -> SpooledReply:
        """Store a reply for folding in ``round``; replaces one of the same site.

        Raises:
            StateError: the disk is full or not writable.
        """
        target = self._round(round) / meta.site
        with atomic_folder(target) as scratch:
            write_tensors(
                scratch / "blobs.safetensors",
                # A view over the bytes: blobs of a large model are not copied here.
                {
                    name: torch.frombuffer(bytearray(blob), dtype=torch.uint8)
                    for name, blob in blobs.items()
                },
            )
            write_json(scratch / "reply.json", asdict(meta))
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
                meta = ReplyMeta(**read_json(entry / "reply.json"))
            except (CheckpointCorrupt, TypeError):
                # Unreadable is as good as never arrived: the site is asked again.
                shutil.rmtree(entry, ignore_errors=True)
                continue
            yield SpooledReply(entry, meta)

    def drop(self, round: int, site: str) -> None:
        """Forget one reply."""
        shutil.rmtree(self._round(round) / site, ignore_errors=True)

    def clear(self, up_to: int) -> None:
        """Remove every round's replies up to and including ``up_to``."""
        if not self.folder.is_dir():
            return
        for entry in self.folder.iterdir():
            name = entry.name.removeprefix("round-")
            if name.isdigit() and int(name) <= up_to:
                shutil.rmtree(entry, ignore_errors=True)

    def size(self, round: int) -> int:
        """Bytes on disk of a round's replies."""
        return sum(p.stat().st_size for p in self._round(round).rglob("*.safetensors"))
