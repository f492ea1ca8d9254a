"""Packing small unsigned integers, least significant bit first."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

__all__ = ["pack_bits", "packed", "packed_size", "unpack_bits"]

Unsigned = NDArray[np.unsignedinteger]

#: Values packed at a time where it takes several arrays of them.
_PIECE = 1 << 17
#: bits -> words that hold as many values as a byte, and the steps that draw them together
_NARROW = {4: ("<u2", (4,)), 2: ("<u4", (6, 12))}
#: the same back: shifts, and what is then left of the word
_WIDEN = {4: ("<u2", ((4, 0x0F0F),)), 2: ("<u4", ((12, 0x000F000F), (6, 0x03030303)))}


def packed_size(count: int, bits: int) -> int:
    """Bytes that ``count`` integers of ``bits`` bits take."""
    return (count * bits + 7) // 8


def pack_bits(values: Unsigned, bits: int) -> bytes:
    """Pack integers below ``2**bits``; the last byte is filled up with zeros.

    Args:
        values: unsigned integers of any width.
        bits: 1 to 25; seven bits more still fit 32.
    """
    return packed(values, bits).tobytes()


def packed(values: Unsigned, bits: int) -> NDArray[np.uint8]:
    """:func:`pack_bits` as an array; it may be ``values`` itself."""
    if bits == 8:
        return values.astype(np.uint8, copy=False)
    if bits == 1:
        return np.packbits(values.astype(np.uint8, copy=False), bitorder="little")
    if bits in _NARROW:
        return _narrow(values, bits)
    out = np.empty(packed_size(values.size, bits), dtype=np.uint8)
    for start in range(0, values.size, _PIECE):
        piece = _groups(values[start : start + _PIECE], bits)
        at = start * bits // 8
        out[at : at + piece.size] = piece[: out.size - at]
    return out


def _narrow(values: Unsigned, bits: int) -> NDArray[np.uint8]:
    """Two or four values lie in a word, a byte each, and move together in it."""
    kind, steps = _NARROW[bits]
    per = 8 // bits
    padded = values.astype(np.uint8, copy=False)
    if values.size % per:
        padded = np.zeros(-(-values.size // per) * per, dtype=np.uint8)
        padded[: values.size] = values
    words = np.ascontiguousarray(padded).view(kind)
    for shift in steps:
        words = words | (words >> shift)
    return words.astype(np.uint8)  # the lowest byte


def _spans(bits: int) -> Iterator[tuple[int, int, int, range]]:
    """Of eight values: place, first byte, bit in that byte, and the bytes it reaches into."""
    for place in range(8):
        first, shift = divmod(place * bits, 8)
        yield place, first, shift, range((shift + bits + 7) // 8)


def _groups(values: Unsigned, bits: int) -> NDArray[np.uint8]:
    """Eight values make ``bits`` bytes."""
    rows = np.zeros((-(-values.size // 8), 8), dtype=np.uint32)
    rows.reshape(-1)[: values.size] = values
    columns = np.ascontiguousarray(rows.T)
    out = np.zeros((bits, len(rows)), dtype=np.uint8)
    for place, first, shift, reach in _spans(bits):
        moved = columns[place] << np.uint32(shift)
        for byte in reach:
            out[first + byte] |= (moved >> np.uint32(8 * byte)).astype(np.uint8)
    return np.ascontiguousarray(out.T).reshape(-1)


def unpack_bits(data: memoryview, count: int, bits: int) -> Unsigned:
    """Inverse of :func:`pack_bits`; ``data`` must have ``packed_size`` bytes."""
    raw = np.frombuffer(data, dtype=np.uint8)
    if bits == 8:
        return raw
    if bits == 1:
        return np.unpackbits(raw, count=count, bitorder="little")
    if bits in _WIDEN:
        kind, steps = _WIDEN[bits]
        words = raw.astype(kind)
        for shift, mask in steps:
            words |= words << shift
            words &= np.array(mask, dtype=kind)
        return words.view(np.uint8)[:count]
    out = np.empty(count, dtype=np.uint32)
    for start in range(0, count, _PIECE):
        stop = min(start + _PIECE, count)
        out[start:stop] = _ungroup(raw[start * bits // 8 : packed_size(stop, bits)], bits)[
            : stop - start
        ]
    return out


def _ungroup(raw: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Inverse of :func:`_groups`; a last group may be cut."""
    rows = np.zeros((-(-raw.size // bits), bits), dtype=np.uint8)
    rows.reshape(-1)[: raw.size] = raw
    columns = np.ascontiguousarray(rows.T).astype(np.uint32)
    out = np.empty((8, len(rows)), dtype=np.uint32)
    mask = np.uint32(2**bits - 1)
    for place, first, shift, reach in _spans(bits):
        word = columns[first].copy()
        for byte in reach[1:]:
            word |= columns[first + byte] << np.uint32(8 * byte)
        np.bitwise_and(word >> np.uint32(shift), mask, out=out[place])
    return np.ascontiguousarray(out.T).reshape(-1)
