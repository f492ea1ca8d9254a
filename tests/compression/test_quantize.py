"""Value codecs: error bounds, extremes of fp32, ragged ends, pieces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flower_geo.compression import floats
from flower_geo.compression.floats import BF16, FP16, FP32, ValueCodec
from flower_geo.compression.integers import Int, Int2

Floats = NDArray[np.float32]
LARGEST = float(np.finfo(np.float32).max)
DENORMAL = float(np.float32(1.401298464324817e-45))

CODECS: list[ValueCodec] = [
    FP32(), BF16(), FP16(), Int(8, 256), Int(8, 9), Int(4, 64), Int(4, 9), Int2(64), Int2(11),
    Int(8, 64, scale="bf16"), Int(4, 9, scale="bf16"),
    Int(8, 64, "stochastic"), Int(4, 9, "stochastic"),
]  # fmt: skip
IDS = [each.spec for each in CODECS]


def there_and_back(codec: ValueCodec, values: Floats) -> Floats:
    payload = codec.encode(values)
    assert len(payload) == codec.size(values.size)
    out, at = np.full(values.size, np.nan, dtype=np.float32), 0
    for start, piece in codec.pieces(memoryview(payload), values.size):
        assert start == at and piece.dtype == np.float32
        out[start : start + piece.size] = piece
        at += piece.size
    assert at == values.size
    return out


def bound(codec: ValueCodec, values: Floats) -> NDArray[np.float64]:
    """Largest error allowed, value by value; 1.01 is for the rounding of the scale."""
    wide: NDArray[np.float64] = np.abs(values.astype(np.float64))
    if isinstance(codec, FP32):
        return 0 * wide
    if isinstance(codec, BF16):
        wide = np.maximum(wide * 2.0**-8, 2.0**-134)
    elif isinstance(codec, FP16):
        wide = np.maximum(wide * 2.0**-10, wide.max(initial=0.0) * 2.0**-39)
    elif isinstance(codec, Int | Int2):
        tops = [wide[at : at + codec.block].max() for at in range(0, wide.size, codec.block)]
        wide = np.repeat(tops, codec.block)[: wide.size]
        if isinstance(codec, Int):
            step = wide / codec.top + (2.0**-133 if codec.scale == "bf16" else 0.0)
            half = 0.5 if codec.round == "nearest" else 1.0
            # Where the largest code would be beyond fp32, the scale is rounded down.
            lost = (codec.scale == "bf16") * (wide > 3e38) * wide * 2.0**-7
            wide = np.maximum(half * step + lost, DENORMAL / 2)
    return 1.01 * wide + (DENORMAL if isinstance(codec, Int2) else 0.0)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)
    | st.lists(st.floats(-1, 1, width=32), max_size=150)
    | st.lists(st.floats(-(2.0**-120), 2.0**-120, width=32), max_size=40)
)
def test_any_finite_values_come_back_within_the_bound(
    codec: ValueCodec, values: list[float]
) -> None:
    source = np.array(values, dtype=np.float32)
    kept = source.copy()
    back = there_and_back(codec, source)
    assert np.array_equal(source, kept)
    assert np.isfinite(back).all()
    error = np.abs(back.astype(np.float64) - source.astype(np.float64))
    assert (error <= bound(codec, source)).all()


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("value", [LARGEST, -LARGEST, 3e38, DENORMAL, -3e-40, 0.0, 1.0])
@pytest.mark.parametrize("count", [1, 3, 64, 129])
def test_constant_blocks_keep_their_value(codec: ValueCodec, value: float, count: int) -> None:
    back = there_and_back(codec, np.full(count, value, dtype=np.float32))
    coarse = getattr(codec, "scale", "fp32") == "bf16"
    assert np.allclose(back, value, rtol=2.0**-7 if coarse else 2.0**-8, atol=2.0**-133)


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_zeros_stay_zeros(codec: ValueCodec) -> None:
    assert not there_and_back(codec, np.zeros(777, dtype=np.float32)).any()
    assert there_and_back(codec, np.zeros(0, dtype=np.float32)).size == 0


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
@pytest.mark.parametrize("count", [1, 99, 100, 101, 999, 1000])
def test_pieces_join_to_the_same_values(
    codec: ValueCodec, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    payload, whole = codec.encode(values), there_and_back(codec, values)
    monkeypatch.setattr(floats, "PIECE", 100)
    assert codec.encode(values) == payload
    assert there_and_back(codec, values).tobytes() == whole.tobytes()


@pytest.mark.parametrize("codec", [Int(8, 64), Int(4, 64), Int2(64)], ids=lambda c: c.spec)
def test_an_outlier_costs_its_own_block_only(codec: ValueCodec) -> None:
    values = np.random.default_rng(0).standard_normal(64 * 10).astype(np.float32)
    clean = there_and_back(codec, values)
    values[200] = 1e4
    back = there_and_back(codec, values)
    same = np.ones(values.size, dtype=bool)
    same[192:256] = False
    assert np.array_equal(back[same], clean[same])
    assert abs(back[200] - 1e4) < 50


def test_lossless_is_lossless_to_the_bit() -> None:
    values = np.array([0.0, -0.0, DENORMAL, -LARGEST, 1 / 3], dtype=np.float32)
    assert there_and_back(FP32(), values).tobytes() == values.tobytes()


def test_bf16_rounds_to_nearest_even() -> None:
    values = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-8 + 2.0**-20], dtype=np.float32)
    wanted = np.array([1.0, 1 + 2.0**-6, 1 + 2.0**-7], dtype=np.float32)
    assert np.array_equal(there_and_back(BF16(), values), wanted)


def test_fp16_scale_saves_tiny_tensors_and_keeps_half_exact() -> None:
    tiny = np.random.default_rng(0).standard_normal(1000).astype(np.float32) * np.float32(1e-9)
    back = there_and_back(FP16(), tiny)
    assert np.abs(back - tiny).max() <= np.abs(tiny).max() * 2.0**-11
    every = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = every[np.isfinite(every)].astype(np.float32)
    assert there_and_back(FP16(), halves).tobytes() == halves.tobytes()


def test_a_biased_tensor_keeps_its_mean() -> None:
    values = np.random.default_rng(0).standard_normal(4096).astype(np.float32) + np.float32(5)
    for codec in (Int(8, 256), Int(4, 64), Int2(64)):
        assert abs(float(there_and_back(codec, values).mean()) - float(values.mean())) < 0.02


def test_errors_shrink_with_bits() -> None:
    values = np.random.default_rng(1).standard_normal(1 << 14).astype(np.float32)
    norm = float(np.linalg.norm(values))
    errors = [
        float(np.linalg.norm(there_and_back(codec, values) - values)) / norm
        for codec in (Int2(64), Int(4, 64), Int(8, 256), BF16(), FP16())
    ]
    # the limits are 10 % above what is measured
    assert all(
        e < limit for e, limit in zip(errors, (0.4, 0.12, 0.0072, 0.0019, 3e-4), strict=True)
    )
    assert errors == sorted(errors, reverse=True)


def test_int2_levels_are_the_means_below_and_above() -> None:
    values = np.array([1, -1, 3, -3, 1, 1, 1, 5], dtype=np.float32)
    # mean magnitude 2: below are four ones and a -1, above 3, -3 and 5
    wanted = np.array([1, -1, 1, -1, 1, 1, 1, 1], dtype=np.float32)
    wanted[[2, 3, 7]] = np.array([11, -11, 11], dtype=np.float32) / 3
    assert np.allclose(there_and_back(Int2(8), values), wanted, rtol=2.0**-8)


@pytest.mark.parametrize("bits", [8, 4])
def test_blocks_are_scaled_by_their_largest(bits: int) -> None:
    codec = Int(bits, 8)
    values = np.array([codec.top, 1, -2, 0, -codec.top, 3, 2.4, -2.6, 0.25], dtype=np.float32)
    wanted = [codec.top, 1, -2, 0, -codec.top, 3, 2, -3, 0.25]
    assert there_and_back(codec, values).tolist() == wanted
