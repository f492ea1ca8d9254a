"""Error feedback: what coding lost is kept, and sent with the next update.

Two phases: an encoded update stages its residual; only an acknowledgement makes
it final.  A reply that was lost or refused rolls back, and then

    sum of all decoded updates + residual = sum of all updates given

holds to fp32 rounding over any pattern of losses (with decay 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flower_geo.compression.codec import Codec
from flower_geo.compression.spec import AnyCodec
from flower_geo.durable import atomic_folder, file_sha256, read_json, read_tensors, write_json
from flower_geo.durable import write_tensors as _write
from flower_geo.errors import CheckpointCorrupt, CodecError

__all__ = ["ErrorFeedback"]


class ErrorFeedback:
    """Residuals by tensor name, fp32.

    Args:
        decay: share of the residual carried into the next update, in [0, 1]
            (SparseLoCo uses 0.95; 1 loses nothing).
    """

    def __init__(self, decay: float = 1.0) -> None:
        if not 0.0 <= decay <= 1.0:
            raise CodecError(f"feedback decay {decay} is not between 0 and 1")
        self.decay = decay
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
        self._staged[name] = whole - Codec.decode(blob, shape=tuple(whole.shape))
        return blob

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
        """Final residuals."""
        return dict(self._final)

    def staged_state_dict(self) -> dict[str, Tensor]:
        """What :meth:`state_dict` would be after :meth:`acknowledge`."""
        return {**self._final, **self._staged}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over final residuals; anything staged is dropped."""
        self._final = {name: tensor.to(torch.float32) for name, tensor in state.items()}
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
        """Read what :meth:`save` wrote.

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
        self.load_state_dict(read_tensors(path))
