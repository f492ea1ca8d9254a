"""The server's side of the downlink: versions of a record, and what a client lacks of them."""

from __future__ import annotations

import hashlib
import uuid
from typing import Any

from flwr.app import ArrayRecord

from flower_geo.compression.envelope import Sent, carried, coded_array, plain_array, split_key
from flower_geo.compression.records import unpack
from flower_geo.compression.spec import AnyCodec
from flower_geo.compression.versions import Broadcaster
from flower_geo.errors import CodecError

__all__ = ["Stream", "digest_of"]


class Stream:
    """The succession of versions of one record, while its names and shapes stay.

    Args:
        record: version 0, plain Arrays.
        coder: downlink codec.
        window: past versions that clients are brought forward from by differences.

    Attributes:
        id: a random name.
        names: tensors that are coded; the others travel as they are.
        given: what the strategy gave, by version; the last two, for replies on their way.

    Raises:
        CorruptPayload: a tensor of the record holds NaN or infinity.
    """

    def __init__(self, record: ArrayRecord, coder: AnyCodec, window: int) -> None:
        self.id = uuid.uuid4().hex
        self.coder = coder
        self.names = carried(record, coder.lossless)
        self.digest = digest_of(record)
        self.broadcaster = Broadcaster(coder, self._floats(record), window=window)
        self.given = {0: ArrayRecord(dict(record))}
        self._hashes = {0: self.broadcaster.hash}
        self._whole: ArrayRecord | None = None
        self._packed: ArrayRecord | None = None

    def _floats(self, record: ArrayRecord) -> dict[str, Any]:
        return unpack(ArrayRecord({name: record[name] for name in self.names}))

    @property
    def version(self) -> int:
        """The newest."""
        return self.broadcaster.version

    @property
    def newest(self) -> ArrayRecord:
        """What the strategy gave as the newest version."""
        return self.given[self.version]

    @property
    def uncoded(self) -> list[str]:
        """Tensors of the newest version that look coded and are not."""
        names = set(self.names)
        return [n for n in carried(self.newest, self.coder.lossless) if n not in names]

    def follow(self, record: ArrayRecord) -> None:
        """Make ``record`` the newest version, if it is not.

        Raises:
            CodecError: its names or shapes are others, or a coded tensor is none any more.
        """
        digest = digest_of(record)
        if digest == self.digest:
            return
        if list(record) != list(self.newest):
            raise CodecError("the record has other names than before")
        # FedAvg's mean of integers is fp64, and all of FedAdam's is: still this stream.
        if not set(self.names) <= set(carried(record, self.coder.lossless)):
            raise CodecError("a tensor of the record is none that the codec carries any more")
        self.broadcaster.advance(self._floats(record))
        self.given[self.version] = ArrayRecord(dict(record))
        self.given.pop(self.version - 2, None)
        self._hashes[self.version] = self.broadcaster.hash
        self._hashes.pop(self.version - self.broadcaster.window - 1, None)
        self.digest, self._whole, self._packed = digest, None, None

    def whole(self) -> ArrayRecord:
        """The newest version as clients hold it, in plain Arrays."""
        if self._whole is None:
            shadow = self.broadcaster.shadow
            self._whole = ArrayRecord(
                {
                    name: array if self.coder.lossless or name not in shadow
                    else plain_array(shadow[name], array.dtype)
                    for name, array in self.newest.items()
                }
            )  # fmt: skip
        return ArrayRecord(dict(self._whole))

    def packed(self) -> ArrayRecord:
        """The newest version by the lossless codec."""
        if self._packed is None:
            shadow, self._packed = self.broadcaster.shadow, ArrayRecord()
            for name, array in self.newest.items():
                if name in shadow:
                    blob = self.coder.encode(shadow[name], name)
                    self._packed[f"+/{name}"] = coded_array(blob, array)
                else:
                    self._packed[f"=/{name}"] = array
        return ArrayRecord(dict(self._packed))

    def send(self, key: str, held: int | None) -> tuple[Sent, ArrayRecord]:
        """What brings a client with the mod from version ``held`` to the newest."""
        made, version = self.broadcaster, self.version
        rest = {f"=/{n}": a for n, a in self.newest.items() if n not in made.shadow}
        kind, first = "whole", 0
        record: ArrayRecord | None = None
        if held == version:
            kind, record = "none", ArrayRecord(rest)
        elif held is not None and self.coder.lossless:
            kind, record = "packed", self.packed()
        elif held in self._hashes:
            offer = made.offer(held, self._hashes[held])
            if offer.kind == "deltas" and offer.record is not None:
                kind, first = "deltas", offer.first
                record = ArrayRecord(
                    {
                        k: coded_array(a.data, self.newest[split_key(k)[1]])
                        for k, a in offer.record.items()
                    }
                    | rest
                )
        sent = Sent(key, kind, self.id, first, version, made.hash)
        return sent, self.whole() if record is None else record


def digest_of(record: ArrayRecord) -> bytes:
    """What tells one record from another: sha256 over all of it."""
    digest = hashlib.sha256()
    for name, array in record.items():
        digest.update(f"{name}\0{array.dtype}\0{array.shape}\0{array.stype}\0".encode())
        digest.update(array.data)
    return digest.digest()
