"""One compression layer for weights, pseudo-gradients, adapters and activations."""

from __future__ import annotations

from flower_geo.compression.codec import BlobInfo, Codec
from flower_geo.compression.feedback import ErrorFeedback
from flower_geo.compression.mod import compression_mod
from flower_geo.compression.records import (
    content_hash,
    pack,
    record_blobs,
    record_from_blobs,
    record_nbytes,
    unpack,
    unpack_blobs,
)
from flower_geo.compression.spec import codec, register
from flower_geo.compression.versions import Broadcaster, Growing, Offer, Replica, none_grows
from flower_geo.compression.wrapper import CompressedStrategy

__all__ = [
    "BlobInfo",
    "Broadcaster",
    "Codec",
    "CompressedStrategy",
    "ErrorFeedback",
    "Growing",
    "Offer",
    "Replica",
    "codec",
    "compression_mod",
    "content_hash",
    "none_grows",
    "pack",
    "record_blobs",
    "record_from_blobs",
    "record_nbytes",
    "register",
    "unpack",
    "unpack_blobs",
]
