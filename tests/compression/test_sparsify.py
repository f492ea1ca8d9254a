"""Top-k: exactly k, ties, ragged ends, and index tables that lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.compression import Codec, codec
from flower_geo.compression.bits import pack_bits, unpack_bits
from flower_geo.compression.sparsify import Selection, TopK
from flower_geo.errors import CorruptPayload

CHOICES = [
    TopK(0.03, 4096), TopK(0.1, 100), TopK(0.5, 64), TopK(0.2, 17), TopK(1.0, 16),
    TopK(0.03, 4096, "bitmap"),
]  # fmt: skip


@pytest.mark.parametrize("topk", CHOICES, ids=lambda c: c.spec)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 100, 4095, 4096, 4097, 10_000])
def test_indices_are_the_largest_of_each_chunk_and_round_trip(topk: TopK, count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    indices = topk.select(values)
    assert indices.size == topk.kept(count)
    assert (np.diff(indices) > 0).all()
    for start in range(0, count, topk.chunk):
        chunk = np.abs(values[start : start + topk.chunk])
        inside = indices[(indices >= start) & (indices < start + topk.chunk)] - start
        assert inside.size == max(1, round(topk.density * chunk.size))
        assert set(chunk[inside]) == set(np.sort(chunk)[::-1][: inside.size])
    packed = topk.pack(indices, count)
    assert len(packed) == topk.index_size(count)
    assert np.array_equal(topk.unpack(memoryview(packed), count), indices)


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("topk", CHOICES, ids=lambda c: c.spec)
def test_ties_give_exactly_k_and_the_same_k(topk: TopK, value: float) -> None:
    values = np.full(9000, value, dtype=np.float32)
    first = topk.select(values)
    assert first.size == topk.kept(9000) == np.unique(first).size
    assert np.array_equal(first, topk.select(values.copy()))


def test_ties_go_to_the_lower_index() -> None:
    values = np.array([1, 2, -2, 1, 2, 2, 1, 5] * 2, dtype=np.float32)
    assert TopK(0.25, 16).select(values).tolist() == [1, 2, 7, 15]
    assert TopK(0.25, 8).select(values).tolist() == [1, 7, 9, 15]
    assert TopK(0.5, 8).select(values[:13]).tolist() == [1, 2, 4, 7, 9, 10]


@given(
    values=st.lists(st.sampled_from([0.0, 1.0, -1.0, 2.0, 0.5]), max_size=80),
    density=st.floats(0.01, 1.0),
    chunk=st.integers(16, 40),
)
def test_any_selection_round_trips(values: list[float], density: float, chunk: int) -> None:
    topk, source = TopK(density, chunk), np.array(values, dtype=np.float32)
    indices = topk.select(source)
    assert indices.size == topk.kept(source.size)
    packed = topk.pack(indices, source.size)
    assert len(packed) == topk.index_size(source.size)
    assert np.array_equal(topk.unpack(memoryview(packed), source.size), indices)
    dropped = np.delete(np.arange(source.size), indices)
    for place in dropped:
        same = indices[indices // chunk == place // chunk]
        assert np.abs(source[place]) <= np.abs(source[same]).min()


def test_an_awkward_dimension_is_padded_not_cut_into_tiny_chunks() -> None:
    for count in (97, 50257, 100):
        assert TopK(0.03, 4096).kept(count) <= 0.04 * count


def indices_packed(topk: TopK, within: list[int]) -> memoryview:
    return memoryview(pack_bits(np.array(within, dtype=np.uint32), topk._bits))


@pytest.mark.parametrize(
    "within",
    [
        [3, 3, 1],  # twice the same
        [4, 2, 1],  # not ascending
        [0, 100, 1],  # beyond the chunk
        [0, 127, 1],
        [0, 1, 10],  # beyond the end
        [0, 1, 99],
    ],
)
def test_indices_that_lie_are_refused(within: list[int]) -> None:
    topk = TopK(0.02, 100)
    assert topk.kept(110) == 3
    assert topk.unpack(indices_packed(topk, [0, 99, 9]), 110).tolist() == [0, 99, 109]
    with pytest.raises(CorruptPayload, match="out of range or not ascending"):
        topk.unpack(indices_packed(topk, within), 110)


@pytest.mark.parametrize("within", [[9, 9], [9, 8], [8, 30], [30, 31], [0, 49]])
def test_indices_that_lie_in_a_short_last_chunk_are_refused(within: list[int]) -> None:
    topk = TopK(0.06, 50)
    assert topk.kept(30) == 2
    assert topk.unpack(indices_packed(topk, [8, 29]), 30).tolist() == [8, 29]
    with pytest.raises(CorruptPayload, match="out of range or not ascending"):
        topk.unpack(indices_packed(topk, within), 30)


@pytest.mark.parametrize("marks", [[0], [], [0, 1, 2], [0, 1, 16, 17, 18], list(range(24))])
def test_a_bitmap_with_other_counts_is_refused(marks: list[int]) -> None:
    topk, table = TopK(0.5, 16), np.zeros(24, dtype=np.uint8)
    assert topk.kept(24) == 12
    table[marks] = 1
    with pytest.raises(CorruptPayload, match="marks another number"):
        topk.unpack(memoryview(np.packbits(table, bitorder="little").tobytes()), 24)


@given(data=st.binary(min_size=9, max_size=9))
def test_random_tables_give_valid_indices_or_are_refused(data: bytes) -> None:
    topk, count = TopK(0.1, 50), 110
    table = data[: topk.index_size(count)]
    assert len(table) == topk.index_size(count)
    try:
        found = topk.unpack(memoryview(table), count)
    except CorruptPayload:
        return
    assert (np.diff(found) > 0).all() and found[0] >= 0 and found[-1] < count
    read = unpack_bits(memoryview(table), found.size, topk._bits)
    assert np.array_equal(found % topk.chunk, read)


def test_top_k_is_a_selection() -> None:
    assert isinstance(TopK(0.5, 16), Selection)


def test_before_a_packer_a_bitmap_is_the_shorter_index() -> None:
    values = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0))
    sizes = [
        len(codec(f"topk(density=0.05,chunk=4096{index})|int2|zstd").encode(values))
        for index in ("", ",index=bitmap")
    ]
    assert sizes[1] < 0.75 * sizes[0]
    blob = codec("topk(density=0.05,index=bitmap)|int2|zstd").encode(values)
    assert Codec.decode(blob).equal(Codec.decode(codec("topk(density=0.05)|int2").encode(values)))
