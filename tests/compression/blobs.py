"""Blobs built by hand, valid checksum included, and tensors to code."""

from __future__ import annotations

import struct
import tracemalloc
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

MAGIC = b"GEO\x01"
FIXED = 11

SPECS = [
    "fp32",
    "bf16",
    "fp16",
    "int8(block=256)",
    "int8(block=8)",
    "int4(block=64)",
    "int4(block=9)",
    "int2(block=64)",
    "topk(density=0.03,chunk=4096)|int8(block=256)",
    "topk(density=0.0156,chunk=4096)|int2(block=64)",
    "topk(density=0.1,chunk=4096,index=bitmap)|int2(block=64)",
    "topk(density=0.1,chunk=100)|bf16",
    "topk(density=0.5,chunk=64)|int4(block=64)",
    "topk(density=0.2,chunk=17)",
    "sign(block=64)",
    "sign(block=9,scale=fp32)",
    "randk(density=0.1,seed=7)|bf16",
    "randk(density=0.25,seed=0,scale=true)|int8(block=256)",
    "fp32|zstd(level=3)",
    "bf16|zstd(level=19)",
    "int8(block=256)|zstd(level=1)",
    "topk(density=0.9,chunk=64)|int8(block=256)|zstd(level=3)",
    "int4(block=64,round=stochastic,seed=5,scale=bf16)",
]


def noise(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal values of a generator of their own."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def seal(rest: bytes) -> bytes:
    """Magic and a right checksum before ``rest``: what only the inner checks can refuse."""
    return MAGIC + struct.pack("<I", zlib.crc32(rest)) + rest


def forge(spec: bytes | str, shape: Sequence[int], payload: bytes, dtype: int = 0) -> bytes:
    """A blob that claims what it is told to."""
    name = spec.encode() if isinstance(spec, str) else spec
    head = struct.pack("<BBB", dtype, len(shape), len(name)) + name
    return seal(head + struct.pack(f"<{len(shape)}Q", *shape) + payload)


def payload_of(blob: bytes) -> bytes:
    """What follows the header."""
    return blob[FIXED + blob[10] + 8 * blob[9] :]


@contextmanager
def allocating_at_most(limit: int) -> Iterator[None]:
    """Fail when numpy and Python together hold ``limit`` bytes more at any moment."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        yield
        peak = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert peak <= limit, f"{peak} bytes were allocated"
