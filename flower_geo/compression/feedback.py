"""Error feedback: what coding lost is kept, and sent with the next update.

Two phases: an encoded update stages its residual; only an acknowledgement makes
it final.  A reply that was lost or refused rolls back, and then

    sum of all decoded updates + residual = sum of all updates given

holds to fp32 rounding over any pattern of losses (with decay 1).  The codec may
change from one update to the next: a residual does not know what it was lost by.

A residual held in bf16 takes half the memory.  It is rounded stochastically, so
that what rounding adds has mean zero over the rounds; rounding to nearest would
drop whatever is small beside the residual, in every round.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from flower_geo.compression.checksum import crc32
from flower_geo.compression.codec import Codec
from flower_geo.compression.spec import AnyCodec
from flower_geo.durable import atomic_folder, file_sha256, read_json, read_tensors, write_json
from flower_geo.durable import write_tensors as _write
from flower_geo.errors import CheckpointCorrupt, CodecError

__all__ = ["ErrorFeedback"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: Values rounded at a time; bounds the memory beside the tensor.
_PIECE = 1 << 20


class ErrorFeedback:
    """Residuals by tensor name.

    Args:
        decay: share of the residual carried into the next update, in [0, 1]
            (SparseLoCo uses 0.95; 1 loses nothing).
        dtype: ``fp32``, or ``bf16`` with stochastic rounding.
        seed: of the rounding.  The same updates under the same seed give the
            same residuals, also after a rollback or a restart.
    """

    def __init__(self, decay: float = 1.0, *, dtype: str = "fp32", seed: int = 0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise CodecError(f"feedback decay {decay} is not between 0 and 1")
        if dtype not in _DTYPES:
            raise CodecError(f"feedback dtype {dtype!r} is not one of {', '.join(_DTYPES)}")
        self.decay = decay
        self.dtype = _DTYPES[dtype]
        self.seed = seed
        self._final: dict[str, Tensor] = {}
        self._staged: dict[str, Tensor] = {}

    def encode(self, name: str, tensor: Tensor, codec: AnyCodec) -> bytes:
        """Encode ``tensor + decay * residual`` and stage what coding loses of it.

        The residual is taken against the decoded bytes, so quantisation error
        is part of it.  Encoding a name again before an acknowledgement starts
        from the same final residual.

        Raises:
            NonFiniteTensor: the sum holds NaN or infinity; nothing is staged.
            CodecError: the residual has another shape than the tensor.
        """
        whole = tensor.detach().to("cpu", torch.float32)
        residual = self._final.get(name)
        if residual is not None:
            if residual.shape != whole.shape:
                raise CodecError(
                    f"the residual of {name} has shape {list(residual.shape)}, "
                    f"the tensor {list(whole.shape)}; drop the state of the other model"
                )
            whole = torch.add(whole, residual, alpha=self.decay)
        blob = codec.encode(whole, name)
        # Not the caller's tensor, which must not change.
        lost = whole.contiguous() if residual is not None else _copied(whole)
        Codec.add_into(blob, lost, -1.0)
        self._staged[name] = self._held(lost, f"{name}/{crc32(blob)}")
        return blob

    def _held(self, residual: Tensor, key: str) -> Tensor:
        """The residual in the dtype it is held in; ``key`` seeds the rounding."""
        if residual.dtype == self.dtype:
            return residual
        if self.dtype == torch.float32:
            return residual.to(torch.float32)
        digest = hashlib.sha256(f"{self.seed}/{key}".encode()).digest()
        return _stochastic_bf16(residual.to(torch.float32), int.from_bytes(digest[:16], "big"))

    def residual(self, name: str) -> Tensor | None:
        """Final residual of a tensor."""
        return self._final.get(name)

    def acknowledge(self) -> None:
        """The staged update arrived and counts: its residual becomes final."""
        self._final = {**self._final, **self._staged}
        self._staged = {}

    def rollback(self) -> None:
        """The staged update does not count: its residual is dropped."""
        self._staged = {}

    def state_dict(self) -> dict[str, Tensor]:
        """Final residuals; they are not to be changed in place."""
        return dict(self._final)

    def staged_state_dict(self) -> dict[str, Tensor]:
        """What :meth:`state_dict` would be after :meth:`acknowledge`."""
        return {**self._final, **self._staged}

    def load_state_dict(self, state: Mapping[str, Tensor], *, own: bool = False) -> None:
        """Take over final residuals; anything staged is dropped.

        Args:
            state: residuals of either dtype.
            own: the caller never changes the tensors again, so that they need
                not be copied (they were just read from a file, say).
        """
        final = {}
        for name, tensor in state.items():
            held = self._held(tensor.detach().cpu(), f"{name}/load")
            # Also where the conversion gave back the very tensor, or a view of it.
            shared = held.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            final[name] = _copied(held) if shared and not own else held
        self._final = final
        self._staged = {}

    def save(self, folder: str | Path) -> None:
        """Write final residuals as a folder with a checksum, in one rename, mode 0600.

        Raises:
            StateError: it cannot be written.
        """
        with atomic_folder(Path(folder)) as scratch:
            digest = _write(scratch / "residual.safetensors", self._final)
            write_json(scratch / "residual.json", {"sha256": digest, "decay": self.decay})

    def load(self, folder: str | Path) -> None:
        """Read what :meth:`save` wrote, memory-mapped: pages come in as they are used.

        Raises:
            CheckpointCorrupt: it is missing, cut or changed.
        """
        meta = read_json(Path(folder) / "residual.json")
        path = Path(folder) / "residual.safetensors"
        try:
            intact = file_sha256(path) == meta["sha256"]
        except (OSError, KeyError, TypeError) as error:
            raise CheckpointCorrupt(f"{folder} cannot be read: {error}") from error
        if not intact:
            raise CheckpointCorrupt(f"{path} is not what was written; its residual is lost")
        self.load_state_dict(read_tensors(path), own=True)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _stochastic_bf16(tensor: Tensor, seed: int) -> Tensor:
    """Round fp32 up or down to bf16, each as likely as the value is near to it.

    The raw stream of numpy's PCG64 is fixed for ever, so a restart on another
    machine rounds the same way.
    """
    source = tensor.contiguous().view(-1).numpy().view(np.uint32)
    bits = np.empty(source.size, dtype=np.uint16)
    draws = np.random.PCG64(seed)
    for start in range(0, source.size, _PIECE):
        piece = source[start : start + _PIECE]
        noise = draws.random_raw(-(-piece.size // 4)).view(np.uint16)[: piece.size]
        rounded = ((piece + noise) >> 16).astype(np.uint16)
        # The largest values must not be rounded up to infinity.
        beyond = (rounded & 0x7F80) == 0x7F80
        if beyond.any():
            rounded[beyond] = (piece[beyond] >> 16).astype(np.uint16)
        bits[start : start + _PIECE] = rounded
    return torch.from_numpy(bits).view(torch.bfloat16).view(tensor.shape)
