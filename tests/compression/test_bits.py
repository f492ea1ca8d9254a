"""Packed integers: every width and length there and back, layout, padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.compression.bits import pack_bits, packed_size, unpack_bits

WIDTHS = [1, 2, 3, 4, 8, 12, 13]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("length", range(18))
def test_every_short_length_round_trips(bits: int, length: int) -> None:
    values = np.random.default_rng(length).integers(0, 2**bits, length).astype(np.uint32)
    for each in (values, np.full_like(values, 2**bits - 1), np.zeros_like(values)):
        packed = pack_bits(each, bits)
        assert len(packed) == packed_size(length, bits)
        assert np.array_equal(unpack_bits(memoryview(packed), length, bits), each)


@given(bits=st.integers(1, 24), data=st.data())
def test_any_width_round_trips(bits: int, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.integers(0, 2**bits - 1), max_size=70))
    packed = pack_bits(np.array(values, dtype=np.uint32), bits)
    assert len(packed) == packed_size(len(values), bits)
    assert unpack_bits(memoryview(packed), len(values), bits).tolist() == values


@pytest.mark.parametrize("bits", WIDTHS)
def test_bits_lie_least_significant_first_and_padding_is_zero(bits: int) -> None:
    values = [(7 * place + 1) % 2**bits for place in range(11)]
    number = sum(value << (bits * place) for place, value in enumerate(values))
    wanted = number.to_bytes(packed_size(11, bits), "little")
    assert pack_bits(np.array(values, dtype=np.uint32), bits) == wanted


def test_padding_does_not_leak_into_values() -> None:
    for bits in (1, 2, 4, 3, 13):
        packed = bytearray(pack_bits(np.array([1], dtype=np.uint32), bits))
        spare = 8 * len(packed) - bits
        packed[-1] |= (0xFF << (8 - spare)) & 0xFF
        assert unpack_bits(memoryview(bytes(packed)), 1, bits).tolist() == [1]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8, 12, 25])
@pytest.mark.parametrize("length", [(1 << 17) - 1, 1 << 17, (1 << 17) + 1, 300_007])
def test_long_runs_round_trip_as_by_single_bits(bits: int, length: int) -> None:
    values = np.random.default_rng(bits).integers(0, 2**bits, length).astype(np.uint32)
    planes = (values[:, None] >> np.arange(bits, dtype=np.uint32)) & np.uint32(1)
    wanted = np.packbits(planes.astype(np.uint8).reshape(-1), bitorder="little").tobytes()
    assert pack_bits(values, bits) == wanted
    assert np.array_equal(unpack_bits(memoryview(wanted), length, bits), values)
