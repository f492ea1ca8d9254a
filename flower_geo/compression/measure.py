"""What codecs make of given tensors: size, error and speed, measured."""

from __future__ import annotations

import fnmatch
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from flower_geo.compression.codec import Codec
from flower_geo.compression.spec import AnyCodec
from flower_geo.errors import CodecError, ConfigError, DataError, NonFiniteTensor

__all__ = ["DEFAULT_SPECS", "Measurement", "measure", "measure_file", "total"]

#: What the command shows when it is asked for no codec by name.
DEFAULT_SPECS = (
    "fp32",
    "fp32|zstd(level=3)",
    "bf16",
    "int8(block=256)",
    "int4(block=64)",
    "int2(block=64)",
    "sign(block=256)",
    "topk(density=0.03,chunk=4096)|int8(block=256)",
    "topk(density=0.0156,chunk=4096)|int2(block=64)",
)
#: Tensors up to this many values are coded several times, and the best time counts.
_SMALL, _REPEATS = 1 << 22, 3
T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """One codec on one tensor, or on several together.

    Attributes:
        spec: the codec.
        tensor: its name; "" for several.
        values: how many.
        nbytes: encoded, headers included.
        error, energy: sums of squares of what coding changed, and of the values.
        worst: largest absolute error of a value.
        encode_seconds, decode_seconds: time on this machine.
    """

    spec: str
    tensor: str
    values: int
    nbytes: int
    error: float
    energy: float
    worst: float
    encode_seconds: float
    decode_seconds: float

    @property
    def ratio(self) -> float:
        """Bytes in fp32 over bytes encoded."""
        return 4 * self.values / self.nbytes if self.nbytes else math.nan

    @property
    def bits(self) -> float:
        """Bits a value."""
        return 8 * self.nbytes / self.values if self.values else math.nan

    @property
    def relative_error(self) -> float:
        """L2 norm of what coding changed over that of the values."""
        if not self.energy:
            return math.inf if self.error else 0.0
        return math.sqrt(self.error / self.energy)

    @property
    def encode_speed(self) -> float:
        """Megabytes of fp32 encoded a second."""
        return self._speed(self.encode_seconds)

    @property
    def decode_speed(self) -> float:
        """Megabytes of fp32 decoded a second."""
        return self._speed(self.decode_seconds)

    def _speed(self, seconds: float) -> float:
        return 4e-6 * self.values / seconds if seconds else math.nan


def measure(coder: AnyCodec, tensor: Tensor, name: str = "") -> Measurement:
    """Encode and decode one tensor.

    Raises:
        NonFiniteTensor: it holds NaN or infinity.
        CodecError: it is not of floating point, or no rule of the codec names it.
    """
    whole = tensor.detach().to("cpu", torch.float32).contiguous()
    shape = tuple(whole.shape)
    repeats = _REPEATS if whole.numel() <= _SMALL else 1
    encode_seconds, blob = _timed(lambda: coder.encode(tensor, name), repeats)
    decode_seconds, back = _timed(lambda: Codec.decode(blob, shape=shape), repeats)
    off = back.sub_(whole).reshape(-1)
    return Measurement(
        coder.spec, name, whole.numel(), len(blob), _squares(off), _squares(whole.reshape(-1)),
        float(off.abs().max()) if off.numel() else 0.0, encode_seconds, decode_seconds,
    )  # fmt: skip


def _timed(call: Callable[[], T], repeats: int) -> tuple[float, T]:
    best = math.inf
    for _ in range(repeats):
        began = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - began)
    return best, result


def _squares(flat: Tensor) -> float:
    # Piece by piece: in fp64 a whole tensor would take twice its own memory.
    starts = range(0, flat.numel(), _SMALL)
    return math.fsum(float(flat[at : at + _SMALL].double().square().sum()) for at in starts)


def total(measurements: Sequence[Measurement]) -> Measurement:
    """Several measurements of one codec as one.

    Raises:
        ValueError: there are none.
    """
    if not measurements:
        raise ValueError("no measurements to add up")
    sums = [
        sum(getattr(one, name) for one in measurements)
        for name in ("values", "nbytes", "error", "energy", "encode_seconds", "decode_seconds")
    ]
    values, nbytes, error, energy, encoding, decoding = sums
    worst = max(one.worst for one in measurements)
    return Measurement(
        measurements[0].spec, "", int(values), int(nbytes), error, energy, worst, encoding,
        decoding,
    )  # fmt: skip


def measure_file(
    path: Path, codecs: Sequence[AnyCodec], only: Sequence[str] = (), threads: int = 1
) -> list[list[Measurement]]:
    """Measure codecs on the tensors of a safetensors file, one tensor in memory at a time.

    Args:
        path: the file.
        codecs: what to measure.
        only: shell patterns; tensors that match none are left out.
        threads: how many torch may use meanwhile.

    Returns:
        For each codec a measurement for each tensor.

    Raises:
        ConfigError: there is no such file, or no tensor to measure in it.
        DataError: it is no whole safetensors file, or a tensor cannot be coded.
        CodecSpecError: no rule of a codec names a tensor.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = _measure_all(path, codecs, only)
    finally:
        torch.set_num_threads(before)
    if not any(found):
        known = "no tensors" if not only else f"no tensor that matches {' or '.join(only)}"
        raise ConfigError(f"{path} holds {known}; name a file of weights or updates")
    return found


def _measure_all(
    path: Path, codecs: Sequence[AnyCodec], only: Sequence[str]
) -> list[list[Measurement]]:
    found: list[list[Measurement]] = [[] for _ in codecs]
    for name, tensor in _tensors(path, only):
        if not tensor.is_floating_point():
            kind = str(tensor.dtype).removeprefix("torch.")
            raise DataError(
                f"tensor {name} of {path} is {kind}, not floating point; "
                "choose others with --only, for instance --only '*.weight'"
            )
        for into, coder in zip(found, codecs, strict=True):
            try:
                into.append(measure(coder, tensor, name))
            except NonFiniteTensor:
                raise DataError(
                    f"tensor {name} of {path} holds NaN or infinity, which no codec sends; "
                    "mend it, or choose others with --only"
                ) from None
            except CodecError as error:
                raise type(error)(f"{path}: {error}") from None
    return found


def _tensors(path: Path, only: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; name a .safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                if not only or any(fnmatch.fnmatchcase(name, one) for one in only):
                    yield name, file.get_tensor(name)
    except (OSError, SafetensorError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{path} is no whole safetensors file ({reason}); write it with "
            "safetensors.torch.save_file, or copy it again"
        ) from error
