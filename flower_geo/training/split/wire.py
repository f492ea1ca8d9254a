"""What hidden states and gradients become on their way between the halves."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from flower_geo.calls import Blob
from flower_geo.compression import Codec, codec
from flower_geo.errors import ConfigError
from flower_geo.models.split.noise import noised
from flower_geo.training.split.references import References
from flower_geo.training.split.values import DTYPES, NAMES, blob_of, refused

__all__ = ["CutName", "Sent", "Wire", "WireEnd", "seed_of"]

#: ``lower``: from the site's bottom to the cloud; ``upper``: from the cloud to the site's top.
CutName = Literal["lower", "upper"]
CUTS: tuple[CutName, ...] = ("lower", "upper")

_WHOLE, _CHANGE, _GRADIENT = "activation", "activation-delta", "gradient"


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Settings that both halves share.

    Attributes:
        codec_activations: of hidden states; with delta coding, of their changes.
        codec_gradients: of gradients at a cut.
        codec_whole: with delta coding, of a sample that has no reference yet.
        delta_bytes: bytes of references at most, for each site and cut; 0 = no delta
            coding.
        activation_noise: standard deviation of the Gaussian noise on what leaves the
            bottom, as a share of each token's root mean square; 0 = none.

    Raises:
        ConfigError: a value is out of its range.
        CodecSpecError: a codec cannot be read.
    """

    codec_activations: str = "bf16"
    codec_gradients: str = "bf16"
    codec_whole: str = "bf16"
    delta_bytes: int = 0
    activation_noise: float = 0.0

    def __post_init__(self) -> None:
        for spec in (self.codec_activations, self.codec_gradients, self.codec_whole):
            codec(spec)
        if self.delta_bytes < 0:
            raise ConfigError(f"delta-bytes={self.delta_bytes} is negative; use 0 or more")
        if not (math.isfinite(self.activation_noise) and self.activation_noise >= 0):
            raise ConfigError(f"activation-noise={self.activation_noise} is no number from 0")

    def terms(self) -> dict[str, str]:
        """Plain strings for the halves to compare before they begin."""
        return {
            "codec-activations": codec(self.codec_activations).spec,
            "codec-gradients": codec(self.codec_gradients).spec,
            "codec-whole": codec(self.codec_whole).spec,
            "delta-bytes": str(self.delta_bytes),
            "activation-noise": repr(self.activation_noise),
        }


@dataclass(frozen=True)
class Sent:
    """Hidden states as a call or an answer holds them."""

    meta: dict[str, Any] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)


class WireEnd:
    """One end of one site's wire.

    Args:
        wire: settings, the same at both ends.
        seed: of the noise.
    """

    def __init__(self, wire: Wire, seed: int = 0) -> None:
        self.wire = wire
        self._activations, self._gradients = (
            codec(wire.codec_activations),
            codec(wire.codec_gradients),
        )
        self._whole = codec(wire.codec_whole) if wire.delta_bytes else self._activations
        self.references = {cut: References(wire.delta_bytes) for cut in CUTS}
        self._noise = torch.Generator().manual_seed(seed)

    @property
    def mark(self) -> str | None:
        """Equal at both ends as long as their references are; None without any."""
        if not self.wire.delta_bytes:
            return None
        return "".join(self.references[cut].mark for cut in CUTS)

    def noisy(self, hidden: Tensor) -> Tensor:
        """Hidden states [b, n, d] with noise on them, detached; the tensor itself for none."""
        return noised(hidden.detach(), self.wire.activation_noise, self._noise)

    def send(self, cut: CutName, hidden: Tensor, samples: Sequence[int] | None) -> Sent:
        """Hidden states [b, n, d] as blobs.

        Args:
            cut: where they pass.
            hidden: detached.
            samples: ids of the b rows; None = sent whole and not remembered.

        Raises:
            NonFiniteTensor: they hold NaN or infinity.
        """
        meta: dict[str, Any] = {"dtype": NAMES.get(hidden.dtype, "float32")}
        if not self.wire.delta_bytes or samples is None:
            return Sent(meta, {_WHOLE: self._whole.encode(hidden, _WHOLE)})
        rows = hidden.to("cpu", torch.float32)
        known = self._known(cut, samples, *rows.shape[1:])
        old = [row for row, found in enumerate(known) if found is not None]
        new = [row for row, found in enumerate(known) if found is None]
        blobs: dict[str, bytes] = {}
        if new:
            blobs[_WHOLE] = self._whole.encode(rows[new], _WHOLE)
        if old:
            base = torch.stack([found for found in known if found is not None])
            blobs[_CHANGE] = self._activations.encode(rows[old] - base, _CHANGE)
        self._rebuilt(cut, samples, known, blobs, rows.shape)
        return Sent(meta | {"delta": old}, blobs)

    def receive(
        self,
        cut: CutName,
        meta: Mapping[str, Any],
        blobs: Mapping[str, Blob],
        samples: Sequence[int] | None,
        width: int,
        max_tokens: int,
    ) -> Tensor:
        """Hidden states [b, n, width] of a call or an answer, on the CPU.

        Raises:
            CallFailed: they are of another shape, or the ends have drifted apart.
            CorruptPayload: a blob is damaged.
        """
        dtype = DTYPES.get(str(meta.get("dtype")))
        if dtype is None:
            raise refused(f"its dtype is none of {', '.join(DTYPES)}")
        delta = meta.get("delta")
        if not self.wire.delta_bytes or samples is None:
            if delta is not None:
                raise refused("it is delta coded, which this side is not; use one setting")
            shape = _shape(blob_of(blobs, _WHOLE), width, max_tokens, None)
            return Codec.decode(blobs[_WHOLE], dtype, shape)
        shapes = [
            _shape(blobs[name], width, max_tokens, None)
            for name in (_WHOLE, _CHANGE)
            if name in blobs
        ]
        rows, lengths = sum(shape[0] for shape in shapes), {shape[1] for shape in shapes}
        if rows != len(samples) or len(lengths) != 1 or rows * min(lengths) > max_tokens:
            raise refused(f"its hidden states are not those of {len(samples)} samples")
        length = lengths.pop()
        known = self._known(cut, samples, length, width)
        if delta != [row for row, found in enumerate(known) if found is not None]:
            raise refused("its samples are remembered differently here; begin the round anew")
        counts = (len(samples) - len(delta), len(delta))
        for name, count in zip((_WHOLE, _CHANGE), counts, strict=True):
            if (name in blobs) != (count > 0):
                raise refused(f"its {name} is not of {count} samples")
            if count:
                _shape(blobs[name], width, max_tokens, count)
        return self._rebuilt(cut, samples, known, blobs, (rows, length, width)).to(dtype)

    def send_gradient(self, gradient: Tensor) -> dict[str, bytes]:
        """A gradient at a cut as a blob; ``NonFiniteTensor`` where it is not finite."""
        return {_GRADIENT: self._gradients.encode(gradient, _GRADIENT)}

    def receive_gradient(self, blobs: Mapping[str, Blob], like: Tensor) -> Tensor:
        """The gradient for hidden states ``like``, in their dtype, on their device.

        Raises:
            CallFailed: there is none.
            CorruptPayload: it is damaged, or of another shape.
        """
        blob = blob_of(blobs, _GRADIENT)
        return Codec.decode(blob, like.dtype, tuple(like.shape)).to(like.device)

    def commit(self) -> None:
        """The step was taken: what it sent is remembered for good."""
        for references in self.references.values():
            references.commit()

    def rollback(self) -> None:
        """The step was not taken."""
        for references in self.references.values():
            references.rollback()

    def forget(self) -> None:
        """Drop all references; the other end must do so too."""
        for references in self.references.values():
            references.forget()

    def state(self) -> dict[str, Tensor]:
        """References and the noise's stream at a step's boundary."""
        found = {"noise": self._noise.get_state()} if self.wire.activation_noise else {}
        for cut, references in self.references.items():
            found |= {f"{cut}/{key}": value for key, value in references.state().items()}
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on where ``state`` was taken."""
        if "noise" in state:
            self._noise.set_state(state["noise"])
        for cut, references in self.references.items():
            lead = f"{cut}/"
            own = {k.removeprefix(lead): v for k, v in state.items() if k.startswith(lead)}
            references.load(own)

    def _known(
        self, cut: CutName, samples: Sequence[int], length: int, width: int
    ) -> list[Tensor | None]:
        return [self.references[cut].get(sample, length, width) for sample in samples]

    def _rebuilt(
        self,
        cut: CutName,
        samples: Sequence[int],
        known: Sequence[Tensor | None],
        blobs: Mapping[str, Blob],
        shape: Sequence[int],
    ) -> Tensor:
        """What the receiver makes of the blobs (fp32), remembered; the sender does it too."""
        whole = iter(Codec.decode(blobs[_WHOLE]) if _WHOLE in blobs else ())
        change = iter(Codec.decode(blobs[_CHANGE]) if _CHANGE in blobs else ())
        rows = torch.empty(tuple(shape), dtype=torch.float32)
        for row, found in enumerate(known):
            rows[row] = next(whole) if found is None else found + next(change)
        references = self.references[cut]
        for sample, kept in zip(samples, rows, strict=True):
            references.put(sample, kept)
        references.note(samples, *(blobs[name] for name in (_WHOLE, _CHANGE) if name in blobs))
        return rows


def seed_of(*words: object) -> int:
    """A seed that follows from words alone."""
    digest = hashlib.sha256("/".join(map(str, words)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def _shape(blob: Blob, width: int, max_tokens: int, rows: int | None) -> tuple[int, ...]:
    shape = Codec.inspect(blob).shape
    good = len(shape) == 3 and shape[2] == width and 0 < shape[0] * shape[1] <= max_tokens
    if not good or rows not in (None, shape[0]):
        wanted = f"[{'batch' if rows is None else rows}, length, {width}]"
        raise refused(
            f"its hidden states have shape {list(shape)[:4]}, not {wanted} "
            f"with at most {max_tokens} tokens"
        )
    return shape
