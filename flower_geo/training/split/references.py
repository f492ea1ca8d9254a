"""What both ends of a wire remember of samples, so that only what changed is sent.

AQ-SGD (Wang et al. 2022, Algorithm 1): of a sample that was sent before, the
difference to what the receiver made of it then is coded, so that the coding
error falls as the weights come to rest.  Both ends must hold the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flower_geo.calls import Blob
from flower_geo.compression.checksum import crc32

__all__ = ["References"]

_MARK = 16
_MARK_KEY = "mark"


class References:
    """The last hidden states [n, d] (fp32, CPU) of each sample at one cut.

    Nothing is ever evicted to make room: samples come round in epochs, where the
    oldest is the next to be wanted.  One that finds no room is sent whole.

    What a step adds is staged: ``commit`` when the step was taken, ``rollback``
    when it was not.

    Args:
        budget: bytes to hold at most.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._kept: dict[int, Tensor] = {}
        self._staged: dict[int, Tensor | None] = {}
        self._mark = self._staged_mark = bytes(_MARK)
        self._bytes = self._staged_bytes = 0

    @property
    def mark(self) -> str:
        """Hash of all that was committed: equal at both ends, or they have drifted apart."""
        return self._mark.hex()

    @property
    def nbytes(self) -> int:
        """Bytes held, staged ones included."""
        return self._staged_bytes

    def get(self, sample: int, length: int, width: int) -> Tensor | None:
        """The reference of a sample, cut or filled with zeros to [length, width]."""
        found = self._staged[sample] if sample in self._staged else self._kept.get(sample)
        if found is None or found.shape[1] != width:
            return None
        if found.shape[0] >= length:
            return found[:length]
        return torch.cat([found, found.new_zeros(length - found.shape[0], width)])

    def put(self, sample: int, row: Tensor) -> None:
        """Stage a new reference [n, d], if there is room for it."""
        known = self._staged[sample] if sample in self._staged else self._kept.get(sample)
        before = known.nbytes if known is not None else 0
        size = row.numel() * 4
        if self._staged_bytes - before + size <= self.budget:
            self._staged[sample] = row.to(torch.float32, copy=True).contiguous()
            self._staged_bytes += size - before
        elif known is not None:
            self._staged[sample] = None
            self._staged_bytes -= before

    def note(self, samples: Sequence[int], *blobs: Blob) -> None:
        """Let the mark go on over what was just sent or received."""
        words = [self._staged_mark.hex(), list(samples), [crc32(blob) for blob in blobs]]
        self._staged_mark = hashlib.blake2b(repr(words).encode(), digest_size=_MARK).digest()

    def commit(self) -> None:
        """The step was taken."""
        for sample, row in self._staged.items():
            if row is None:
                self._kept.pop(sample, None)
            else:
                self._kept[sample] = row
        self._staged = {}
        self._mark, self._bytes = self._staged_mark, self._staged_bytes

    def rollback(self) -> None:
        """The step was not taken."""
        self._staged = {}
        self._staged_mark, self._staged_bytes = self._mark, self._bytes

    def forget(self) -> None:
        """Start anew."""
        self.load({})

    def state(self) -> dict[str, Tensor]:
        """What was committed; the tensors are not to be changed in place."""
        if not self.budget:
            return {}
        mark = torch.frombuffer(bytearray(self._mark), dtype=torch.uint8)
        return {_MARK_KEY: mark, **{str(sample): row for sample, row in self._kept.items()}}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` gave; {} = nothing."""
        mark = state.get(_MARK_KEY)
        self._mark = bytes(_MARK) if mark is None else mark.numpy().tobytes()
        self._kept = {int(key): row for key, row in state.items() if key != _MARK_KEY}
        self._bytes = sum(row.nbytes for row in self._kept.values())
        self.rollback()
