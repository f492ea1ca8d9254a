"""Small facts about a reply: its weight, its size, its hash, its line in the log."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.compression import Codec, codec, record_nbytes
from flower_geo.errors import ReplyRefused
from flower_geo.messages import Reply
from flower_geo.resilience.exchange import Open

__all__ = [
    "MAX_NEEDS",
    "NeedLimit",
    "as_differences",
    "payload_bytes",
    "payload_hash",
    "site_line",
    "weight_of",
]


#: Times a site may say within a round that it lacks the base: once for what the
#: coordinator did not know, once more for a payload spoilt on the way.
MAX_NEEDS = 3


class NeedLimit:
    """Counts how often a site says that it lacks the base of a round."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int, str], int] = {}

    def count(self, request: Open) -> None:
        """Note one more.

        Raises:
            ReplyRefused: the site said it too often.
        """
        key = (request.site, request.round, request.kind)
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] > MAX_NEEDS:
            raise ReplyRefused(f"it asked {MAX_NEEDS} times for the base of round {request.round}")

    def forget_before(self, round: int) -> None:
        """Drop the counts of earlier rounds."""
        self._counts = {key: count for key, count in self._counts.items() if key[1] >= round}


def weight_of(reply: Reply, weight_by: str) -> float:
    """Weight of a reply in the mean: its tokens, its examples, or one."""
    return 1.0 if weight_by == "equal" else reply.metrics.get(weight_by, 0.0)


def payload_bytes(arrays: ArrayRecord | None) -> int:
    """Payload bytes of an optional record."""
    return 0 if arrays is None else record_nbytes(arrays)


def payload_hash(blobs: Mapping[str, bytes]) -> str:
    """Hash of encoded tensors, by name."""
    digest = hashlib.sha256()
    for name in sorted(blobs):
        digest.update(name.encode() + b"\0" + hashlib.sha256(blobs[name]).digest())
    return digest.hexdigest()


def as_differences(
    blobs: Mapping[str, bytes], trained_from: Mapping[str, Tensor]
) -> dict[str, bytes]:
    """Turn a reply of weights into base minus local, losslessly coded."""
    plain = codec("fp32")
    return {
        name: plain.encode(trained_from[name] - Codec.decode(blob), name=name)
        for name, blob in blobs.items()
    }


def site_line(reply: Reply) -> dict[str, Any]:
    """A reply's numbers as they stand in a ``site`` event."""
    metrics = reply.metrics
    names = {
        "train_loss": "train-loss", "loss_before": "loss-before", "loss_after": "loss-after",
        "tokens": "tokens", "steps": "steps", "seconds": "seconds",
    }  # fmt: skip
    line: dict[str, Any] = {key: metrics.get(name) for key, name in names.items()}
    line |= {"bytes_up": payload_bytes(reply.arrays), "codec_up": reply.codec, "data": reply.data}
    return line
