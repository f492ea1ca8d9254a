"""Broadcasts with versions: what every site holds, and what it still needs.

The coordinator keeps ``master`` (its own weights) and ``shadow`` (what every
site holds after decoding all it was sent).  Under a lossy codec a version is
the encoded ``master - shadow``, added to the shadow as decoded, so what coding
lost stays in ``master - shadow`` and goes out with the next version.  Under a
lossless codec a version is the weights themselves, because in fp32
``shadow + (master - shadow)`` is not always ``master``.

The codec may change from version to version: every delta says in its own header
what it was coded with, and the shadow does not depend on what came before.

Names and shapes stay from version to version, but for those a ``growing`` predicate
names: such a tensor may appear in any version, as if it had been zeros before, and may be
left out of a later one.  What was sent of it is final, so that it costs nothing again: the
master takes over what the sites hold.

Decoding is fp32 on the CPU, value by value, so all shadows are equal to the
bit; every message carries a hash that proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.compression.codec import Codec
from flower_geo.compression.floats import FP32
from flower_geo.compression.records import (
    content_hash,
    pack,
    record_from_blobs,
    record_nbytes,
    unpack,
)
from flower_geo.compression.spec import AnyCodec
from flower_geo.errors import CheckpointCorrupt, CodecError, CorruptPayload, NonFiniteTensor

__all__ = ["Broadcaster", "Growing", "Offer", "Replica", "none_grows"]

Blobs = dict[str, bytes]
#: Whether a tensor of this name may come and go.
Growing = Callable[[str], bool]


def none_grows(name: str) -> bool:
    """The predicate of an ordinary model: no tensor comes or goes."""
    return False


@dataclass(frozen=True)
class Offer:
    """What brings a site to the newest version.

    Attributes:
        kind: ``none`` (it is there), ``deltas`` (versions ``first`` to ``last``,
            keys ``"<version>/<name>"``) or ``snapshot`` (weights of ``last``).
        record: the payload; None for ``none``.
        nbytes: payload bytes.
    """

    kind: Literal["none", "deltas", "snapshot"]
    record: ArrayRecord | None = None
    first: int = 0
    last: int = 0
    nbytes: int = 0


class Broadcaster:
    """The coordinator's side.

    Args:
        codec: downlink codec.
        master: fp32 weights of version ``version``.
        window: versions kept as deltas for sites that fall behind.
        own: the caller never changes these tensors again, so that they need not
            be copied.
        growing: names of tensors that may come and go.

    Attributes:
        codec: codec of the newest version.
        master, shadow: fp32 weights; tensors handed out are never changed.
        version: the newest version.
        hash: content hash of ``shadow``.
    """

    def __init__(
        self,
        codec: AnyCodec,
        master: Mapping[str, Tensor],
        version: int = 0,
        window: int = 4,
        *,
        own: bool = False,
        growing: Growing = none_grows,
    ) -> None:
        self.codec = codec
        self.growing = growing
        self.master: dict[str, Tensor] = dict(master) if own else _copied(master)
        self.shadow: dict[str, Tensor] = self.master
        self.version = version
        self.window = window
        self.hash = content_hash(self.shadow)
        #: version -> delta that leads to it and the hash of the shadow before it
        self._deltas: dict[int, tuple[str, Blobs]] = {}
        self._snapshot: ArrayRecord | None = None

    def carried(self, decay: float) -> Mapping[str, Tensor]:
        """The master with ``decay`` times what coding has kept from the sites.

        ``shadow + decay (master - shadow)``, the master itself for 1.  Sites that train
        from a shadow far behind it ask again for steps the master has taken already; a
        decay below 1 keeps these from adding up, as error feedback's does at a site.
        """
        if decay == 1 or self.shadow is self.master:
            return self.master
        return {
            name: torch.lerp(before, self.master[name], decay)
            for name, before in self.shadow.items()
        }

    def advance(
        self,
        new_master: Mapping[str, Tensor],
        *,
        codec: AnyCodec | None = None,
        own: bool = False,
    ) -> None:
        """Make ``new_master`` the next version.

        Args:
            new_master: fp32 weights.
            codec: codec of this version and the next ones; the one before by default.
            own: the caller never changes these tensors again, so that they need
                not be copied.

        Raises:
            NonFiniteTensor: it holds NaN or infinity; nothing has changed then.
            CodecError: its names, shapes or dtypes differ from the last version's.
        """
        self._check(new_master)
        chosen = self.codec if codec is None else codec
        blobs: Blobs = {}
        shadow: dict[str, Tensor] = {}
        if chosen.lossless:
            for name, tensor in new_master.items():
                if not bool(torch.isfinite(tensor).all()):
                    raise NonFiniteTensor(f"tensor {name} holds NaN or infinity; it is not sent")
        else:
            for name, tensor in new_master.items():
                before = self.shadow.get(name, torch.zeros(()))
                blob = chosen.encode(tensor - before, name)
                blobs[name] = blob
                shadow[name] = before + Codec.decode(blob, shape=tuple(tensor.shape))
        master = dict(new_master) if own else _copied(new_master)
        master |= {name: tensor for name, tensor in shadow.items() if self.growing(name)}
        self.codec = chosen
        self.version += 1
        if not chosen.lossless:
            self._deltas[self.version] = (self.hash, blobs)
        for old in [each for each in self._deltas if each <= self.version - self.window]:
            del self._deltas[old]
        self.master, self.shadow = master, master if chosen.lossless else shadow
        self.hash = content_hash(self.shadow)
        self._snapshot = None

    def _check(self, new: Mapping[str, Tensor]) -> None:
        """Torch would broadcast another shape, and a name too many would never be sent."""
        changed = (name for name in new.keys() ^ self.shadow.keys() if not self.growing(name))
        odd = sorted(changed) or [
            name
            for name, tensor in new.items()
            if tensor.dtype != torch.float32 or tensor.shape != self.shadow.get(name, tensor).shape
        ]
        if odd:
            raise CodecError(
                f"the weights after version {self.version} differ from it in tensor {odd[0]} "
                f"({len(odd)} in all): names and shapes must stay, in fp32"
            )

    def offer(self, version: int, hash: str) -> Offer:
        """The cheapest payload for a site that holds ``version`` with content ``hash``."""
        if (version, hash) == (self.version, self.hash):
            return Offer("none", first=version, last=version)
        needed = range(version + 1, self.version + 1)
        if needed and all(each in self._deltas for each in needed):
            before, _ = self._deltas[needed[0]]
            size = sum(len(b) for each in needed for b in self._deltas[each][1].values())
            if before == hash and size < self._snapshot_size():
                blobs = {
                    f"{each}/{name}": blob
                    for each in needed
                    for name, blob in self._deltas[each][1].items()
                }
                return Offer("deltas", record_from_blobs(blobs), needed[0], self.version, size)
        if self._snapshot is None:
            exact = self.codec if self.codec.lossless else Codec(FP32())
            self._snapshot = pack(self.shadow, exact)
        # A new record each time: Flower's messages must not share one.
        record = ArrayRecord(dict(self._snapshot.items()))
        return Offer("snapshot", record, self.version, self.version, record_nbytes(record))

    def _snapshot_size(self) -> int:
        return sum(4 * tensor.numel() for tensor in self.shadow.values())

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Deltas as uint8 tensors and JSON data, for a checkpoint beside master and shadow."""
        tensors = {
            f"{version}/{name}": torch.frombuffer(bytearray(blob), dtype=torch.uint8)
            for version, (_, blobs) in self._deltas.items()
            for name, blob in blobs.items()
        }
        before = {str(version): hash for version, (hash, _) in self._deltas.items()}
        meta = {
            "version": self.version, "hash": self.hash, "before": before, "window": self.window,
        }  # fmt: skip
        return tensors, meta

    @classmethod
    def restore(
        cls,
        codec: AnyCodec,
        master: Mapping[str, Tensor],
        shadow: Mapping[str, Tensor],
        deltas: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        growing: Growing = none_grows,
    ) -> Broadcaster:
        """Inverse of :meth:`state`; the tensors given are kept, not copied.

        Raises:
            CheckpointCorrupt: the shadow is not the one the state was taken of.
        """
        # What was read for this is nobody else's.
        made = cls(
            codec, shadow, int(meta["version"]), int(meta["window"]), own=True, growing=growing
        )
        made.master = dict(master)
        if made.hash != meta["hash"]:
            raise CheckpointCorrupt(f"the weights of version {made.version} fail their hash")
        for key, tensor in deltas.items():
            version, _, name = key.partition("/")
            entry = made._deltas.setdefault(int(version), (str(meta["before"][version]), {}))
            entry[1][name] = tensor.numpy().tobytes()
        made._deltas = dict(sorted(made._deltas.items()))
        return made


def _copied(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in state.items()}


class Replica:
    """A site's side: weights of one version, brought forward by what was sent.

    The state given is not copied; changed in place, it fails the hash of the
    next deltas, and a snapshot heals it.
    """

    def __init__(
        self, state: Mapping[str, Tensor], version: int, growing: Growing = none_grows
    ) -> None:
        self.state: dict[str, Tensor] = dict(state)
        self.version = version
        self.growing = growing

    def apply(
        self, kind: str, record: ArrayRecord, first: int, last: int, expect_hash: str
    ) -> None:
        """Apply an offer; afterwards ``state`` is version ``last``.

        Deltas of versions that are there already are passed over: the coordinator
        may not know yet how far a site has come.

        Raises:
            CorruptPayload: the payload is damaged, or its result has another
                hash; ``state`` and ``version`` are then as before.
        """
        if kind == "snapshot":
            state = unpack(record, self._shapes(record, ""))
        elif kind == "deltas":
            versions = range(first, last + 1)
            if not first <= self.version + 1 <= last < first + 1024:
                raise CorruptPayload(f"versions {first} to {last} do not follow {self.version}")
            shapes = {each: self._shapes(record, f"{each}/") for each in versions}
            keyed = {f"{each}/{name}": s for each in versions for name, s in shapes[each].items()}
            deltas, state = unpack(record, keyed), self.state
            for each in versions[self.version + 1 - first :]:
                state = {
                    name: _added(state.get(name), deltas[f"{each}/{name}"]) for name in shapes[each]
                }
        else:
            raise CorruptPayload(f"a broadcast of kind {kind!r} cannot be applied")
        if content_hash(state) != expect_hash:
            raise CorruptPayload(f"version {last} has another hash than the coordinator's")
        self.state, self.version = state, last

    def _shapes(self, record: ArrayRecord, prefix: str) -> dict[str, tuple[int, ...]]:
        """Names and shapes a version in ``record`` must have.

        Growing tensors may have any, within what their bytes can claim: the hash of the
        whole tells what was sent from what was made up.
        """
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in self.state.items()
            if not self.growing(name)
        }
        for key, array in record.items():
            name = key.removeprefix(prefix)
            if key.startswith(prefix) and self.growing(name):
                shapes[name] = Codec.inspect(array.data).shape
        return shapes


def _added(before: Tensor | None, delta: Tensor) -> Tensor:
    if before is None:
        return delta
    if before.shape != delta.shape:
        raise CorruptPayload(f"a delta has shape {list(delta.shape)}, not {list(before.shape)}")
    return before + delta
