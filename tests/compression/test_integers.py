"""Integers: the bytes by a plain formula, random rounding, scales in bf16, hostile codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flower_geo.compression import codec, floats
from flower_geo.compression.bits import pack_bits
from flower_geo.compression.integers import Int
from flower_geo.compression.rounding import Dither
from flower_geo.errors import CodecSpecError, CorruptPayload, NonFiniteTensor

Floats = NDArray[np.float32]
LARGEST = np.finfo(np.float32).max
TINY = np.float32(1e-45)


def decoded(integers: Int, values: Floats) -> Floats:
    payload = memoryview(integers.encode(values))
    parts = [piece for _, piece in integers.pieces(payload, values.size)]
    return np.concatenate([np.zeros(0, dtype=np.float32), *parts])


def normal(count: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def plain_payload(values: Floats, bits: int, block: int) -> bytes:
    """Payload by the definition, block by block."""
    top, scales, codes = np.float32(2 ** (bits - 1) - 1), [], []
    for start in range(0, values.size, block):
        part = values[start : start + block]
        scale = np.maximum(np.abs(part).max() / top, TINY)
        scales.append(scale)
        codes.append(np.rint(part / scale).astype(np.int8))
    head = np.array(scales, dtype="<f4").tobytes()
    every = np.concatenate(codes)
    if bits == 8:
        return head + every.tobytes()
    return head + pack_bits((every + np.int8(7)).view(np.uint8), bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [1, 300, 4096, 70_001])
@pytest.mark.parametrize("kind", ["normal", "halves", "wide", "zeros between"])
def test_the_payload_is_that_of_the_definition(bits: int, count: int, kind: str) -> None:
    values = normal(count, count)
    if kind == "halves":  # ties of rounding
        values = np.round(values * 40) / np.float32(2)
        values[::64] = np.float32(127 if bits == 8 else 7)
    elif kind == "wide":
        values *= np.exp2(np.random.default_rng(1).integers(-90, 90, count)).astype(np.float32)
    elif kind == "zeros between":
        values[: count // 2] = 0
    assert Int(bits, 64).encode(values) == plain_payload(values, bits, 64)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 299, 300])
def test_a_value_that_is_not_finite_is_seen(value: float, place: int) -> None:
    values = normal(301)
    values[place] = value
    for integers in (Int(8, 64), Int(4, 64), Int(8, 64, "stochastic"), Int(4, 64, scale="bf16")):
        with pytest.raises(NonFiniteTensor):
            integers.encode(values)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.3, -0.7, 2.5, 1e-3])
def test_stochastic_rounding_is_unbiased(bits: int, value: float) -> None:
    values = np.full(64, value, dtype=np.float32)
    values[0] = 7 if bits == 4 else 127  # the scale is one
    means = [
        float(decoded(Int(bits, 64, "stochastic", seed), values)[1:].mean()) for seed in range(300)
    ]
    draws = 300 * 63
    assert abs(np.mean(means) - value) < 4 * 0.5 / draws**0.5
    once = decoded(Int(bits, 64, "stochastic"), values)
    assert set(once[1:]) <= {np.floor(value), np.ceil(value)}
    assert once[0] == values[0]


def test_stochastic_rounding_depends_on_seed_and_content_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = normal(10_001)
    coded = Int(8, 64, "stochastic").encode(values)
    assert Int(8, 64, "stochastic").encode(values.copy()) == coded
    assert Int(8, 64, "stochastic", 1).encode(values) != coded
    other = values.copy()
    other[-1] += np.float32(1e-3)
    differ = np.frombuffer(Int(8, 64, "stochastic").encode(other), dtype=np.uint8) != np.frombuffer(
        coded, dtype=np.uint8
    )
    assert differ[4 * 157 :].mean() > 0.2  # other numbers in every block
    monkeypatch.setattr(floats, "PIECE", 999)
    assert Int(8, 64, "stochastic").encode(values) == coded


def test_stochastic_rounding_leaves_whole_numbers_and_zeros() -> None:
    values = np.arange(-127, 128, dtype=np.float32)
    assert np.array_equal(decoded(Int(8, 255, "stochastic"), values), values)
    assert not decoded(Int(8, 64, "stochastic"), np.zeros(500, dtype=np.float32)).any()


def test_dither_is_uniform_and_the_same_everywhere() -> None:
    values = np.arange(3, dtype=np.float32)
    numbers = Dither(5, values).draw(40_000)
    assert 0 < numbers.min() and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01 and abs(numbers.var() - 1 / 12) < 0.003
    assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.02
    assert np.array_equal(Dither(5, values).draw(40_000), numbers)
    # A machine that draws others would give another payload for the same tensor.
    assert (numbers[:4] * 65536).astype(np.int64).tolist() == [48066, 4715, 44099, 12538]


@pytest.mark.parametrize("bits", [8, 4])
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=40)
    | st.lists(st.floats(-1, 1, width=32), max_size=100)
    | st.lists(st.floats(-(2.0**-120), 2.0**-120, width=32), max_size=40)
)
def test_bf16_scales_are_rounded_up_and_never_overflow(bits: int, values: list[float]) -> None:
    integers, source = Int(bits, 9, scale="bf16"), np.array(values, dtype=np.float32)
    payload = integers.encode(source)
    blocks = -(-source.size // 9)
    raw = np.frombuffer(payload[: 2 * blocks], dtype="<u2").astype(np.uint32) << np.uint32(16)
    scales = raw.view(np.float32).astype(np.float64)
    back = decoded(integers, source)
    assert np.isfinite(back).all()
    wide = np.abs(source.astype(np.float64))
    for place, scale in enumerate(scales):
        most = wide[9 * place : 9 * place + 9].max()
        assert scale <= most / integers.top * (1 + 2.0**-6) + 2.0**-133 + TINY
        assert scale * integers.top >= most * (1 - 2.0**-23) or most > 3e38
        here = slice(9 * place, 9 * place + 9)
        error = np.abs(back[here].astype(np.float64) - source[here].astype(np.float64))
        assert (error <= scale * 0.5001 + (most > 3e38) * most * 2.0**-7).all()


@pytest.mark.parametrize("bits", [8, 4])
def test_bf16_scales_take_half_the_bytes(bits: int) -> None:
    values = normal(6400)
    narrow, wide = Int(bits, 64, scale="bf16"), Int(bits, 64)
    assert len(wide.encode(values)) - len(narrow.encode(values)) == 2 * 100
    errors = [np.linalg.norm(decoded(each, values) - values) for each in (wide, narrow)]
    assert errors[0] < errors[1] < 1.02 * errors[0]


@pytest.mark.parametrize("scale", ["fp32", "bf16"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", [8, 4])
def test_an_outlier_spares_the_other_blocks(bits: int, rounding: str, scale: str) -> None:
    integers = Int(bits, 64, rounding, 0, scale)  # type: ignore[arg-type]
    values = normal(640)
    values[200] = 1e4
    back = decoded(integers, values)
    others = np.ones(640, dtype=bool)
    others[192:256] = False
    limit = np.abs(values[others]).max() / integers.top * 1.01
    assert np.abs(back - values)[others].max() <= limit * (1 if rounding == "stochastic" else 0.5)
    assert abs(back[200] - 1e4) < 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("count", [0, 1, 63, 1000, 1024])
def test_adding_is_adding_what_is_decoded(bits: int, count: int, dtype: torch.dtype) -> None:
    values, integers = normal(count), Int(bits, 64)
    payload = memoryview(integers.encode(values))
    out = torch.ones(count, dtype=dtype)
    integers.add_to(payload, count, out, 0.3)
    wanted = torch.ones(count, dtype=dtype)
    wanted.add_(torch.from_numpy(decoded(integers, values)).to(dtype), alpha=0.3)
    assert torch.equal(out, wanted)


@pytest.mark.parametrize("factor", [np.nan, np.inf, -np.inf, LARGEST, LARGEST / 100])
def test_scales_that_lie_are_refused_when_adding(factor: float) -> None:
    payload = bytearray(Int(8, 64).encode(normal(200)))
    payload[4:8] = np.float32(factor).tobytes()
    with pytest.raises(CorruptPayload, match="NaN or infinity"):
        Int(8, 64).add_to(memoryview(payload), 200, torch.zeros(200), 1.0)


def test_a_large_scale_is_refused_only_for_codes_it_overflows() -> None:
    scale = np.float32(LARGEST / 127.5)
    for code, fits in ((127, True), (-127, True), (-128, False)):
        payload = memoryview(scale.tobytes() + np.array([code, 1], dtype=np.int8).tobytes())
        out = torch.zeros(2)
        if fits:
            Int(8, 64).add_to(payload, 2, out, 1.0)
            assert out.tolist() == [float(np.float32(code) * scale), float(scale)]
        else:
            with pytest.raises(CorruptPayload):
                Int(8, 64).add_to(payload, 2, out, 1.0)


def test_specs_show_what_is_not_the_default() -> None:
    assert Int(8, 256).spec == "int8(block=256)"
    assert Int(4, 64, "stochastic").spec == "int4(block=64,round=stochastic)"
    assert Int(8, 64, "stochastic", 7, "bf16").spec == (
        "int8(block=64,round=stochastic,seed=7,scale=bf16)"
    )
    with pytest.raises(CodecSpecError, match="round=stochastic"):
        Int(8, 64, seed=3)


@pytest.mark.parametrize("values", ["int2(block=64)", "int4(block=64)", "int8(block=256)", "bf16"])
def test_top_k_takes_values_of_any_width(values: str) -> None:
    source = torch.from_numpy(normal(20_000))
    chain = codec(f"topk(density=0.03,chunk=4096)|{values}")
    back = type(chain).decode(chain.encode(source))  # type: ignore[union-attr]
    kept = back != 0
    assert int(kept.sum()) <= round(0.03 * 20_000) + 5
    assert (source[kept] - back[kept]).norm() / source[kept].norm() < 0.35


def test_top_k_with_two_bits_is_under_a_quarter_bit_a_value() -> None:
    source = torch.from_numpy(normal(1_000_000))
    blob = codec("topk(density=0.0156,chunk=4096)|int2(block=64)").encode(source)
    assert 8 * len(blob) / source.numel() < 0.25
