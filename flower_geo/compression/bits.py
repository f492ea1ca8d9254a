"""Packing small unsigned integers, least significant bit first."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_bits", "packed_size", "unpack_bits"]


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` integers of ``bits`` bits take."""
    return (count * bits + 7) // 8


def pack_bits(values: NDArray[np.unsignedinteger], bits: int) -> bytes:
    """Pack integers below ``2**bits``; the last byte is filled up with zeros."""
    if bits == 8:
        return values.astype(np.uint8).tobytes()
    if bits in (1, 2, 4):
        per = 8 // bits
        padded = np.zeros(-(-values.size // per) * per, dtype=np.uint8)
        padded[: values.size] = values
        columns = padded.reshape(-1, per)
        out = columns[:, 0].copy()
        for place in range(1, per):
            out |= columns[:, place] << np.uint8(bits * place)
        return out.tobytes()
    wide = values.astype(np.uint32)
    planes = (wide[:, None] >> np.arange(bits, dtype=np.uint32)) & np.uint32(1)
    return np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little").tobytes()


def unpack_bits(data: memoryview, count: int, bits: int) -> NDArray[np.unsignedinteger]:
    """Inverse of :func:`pack_bits`; ``data`` must have ``packed_size`` bytes."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if bits == 8:
        return raw
    if bits in (1, 2, 4):
        per = 8 // bits
        shifts = np.arange(per, dtype=np.uint8) * np.uint8(bits)
        small = (raw[:, None] >> shifts) & np.uint8(2**bits - 1)
        return small.reshape(-1)[:count]
    planes = np.unpackbits(raw, count=count * bits, bitorder="little").reshape(count, bits)
    weights = np.uint32(1) << np.arange(bits, dtype=np.uint32)
    wide: NDArray[np.unsignedinteger] = (planes * weights).sum(axis=1, dtype=np.uint32)
    return wide
