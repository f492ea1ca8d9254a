"""Blobs: every kind of tensor there and back, sizes, layout, adding in place."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from torch import Tensor

from flower_geo.compression import Codec, codec
from flower_geo.errors import CodecError, CorruptPayload, NonFiniteTensor
from tests.compression.blobs import (
    FIXED,
    SPECS,
    allocating_at_most,
    forge,
    noise,
    payload_of,
    seal,
)

LARGEST = torch.finfo(torch.float32).max

AWKWARD: dict[str, Tensor] = {
    "empty": torch.zeros(0),
    "empty rows": torch.zeros(5, 0, 3),
    "scalar": torch.tensor(3.0),
    "one": torch.tensor([-2.5]),
    "zeros": torch.zeros(300, 40),
    "transposed": noise(130, 77).T,
    "strided": noise(200, 50)[::3, 1::2],
    "expanded": noise(90, 1).expand(90, 100),
    "ragged": noise(4097),
    "prime": noise(97, 101),
    "denormal": noise(5000) * 1e-41,
    "huge": torch.tensor([3e38, -3e38, LARGEST, -LARGEST] * 2000),
    "outlier": torch.cat([noise(5000), torch.tensor([1e4])]),
    "ties": torch.ones(9000),
    "bf16": noise(70, 70).to(torch.bfloat16),
    "fp16": noise(70, 70).to(torch.float16),
    "fp64": noise(70, 70).to(torch.float64),
    "parameter": torch.nn.Parameter(noise(70, 70)),
    "8 dimensions": noise(2, 3, 2, 3, 2, 3, 2, 8),
}


def relative_error(back: Tensor, source: Tensor) -> float:
    wide = source.detach().double()
    return float((back.double() - wide).norm() / wide.norm().clamp_min(1e-300))


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("spec", SPECS)
def test_awkward_tensors_round_trip(spec: str, name: str) -> None:
    source = AWKWARD[name]
    before = source.detach().clone()
    if name == "huge" and "scale=true" in spec:
        with pytest.raises(NonFiniteTensor, match="tensor huge exceeds fp32 when randk"):
            codec(spec).encode(source, name)
        return
    blob = codec(spec).encode(source, name)
    back = Codec.decode(blob)
    assert back.shape == source.shape and back.dtype == torch.float32
    assert bool(torch.isfinite(back).all())
    info = Codec.inspect(blob)
    assert (info.shape, info.dtype, info.nbytes) == (tuple(source.shape), source.dtype, len(blob))
    assert len(blob) <= 4 * source.numel() + FIXED + len(info.spec) + 8 * source.dim()
    assert codec(spec).encode(source, name) == blob
    assert torch.equal(source.detach(), before)
    if info.spec == "fp32":
        assert torch.equal(back, before.float())
    elif "topk" not in spec and "randk" not in spec:
        limit = {"int2": 0.5, "int4": 0.2, "sign": 1.0}.get(spec[:4], 0.01)
        assert relative_error(back, source) < limit or name == "denormal"
    if not bool(source.any()):
        assert not bool(back.any())


@pytest.mark.parametrize("spec", SPECS)
def test_non_finite_tensors_are_refused_by_name(spec: str) -> None:
    for bad in (math.nan, math.inf, -math.inf):
        tensor = noise(5000)
        tensor[4999] = bad
        with pytest.raises(NonFiniteTensor, match=r"tensor h\.3\.mlp holds NaN or infinity"):
            codec(spec).encode(tensor, "h.3.mlp")
    with pytest.raises(NonFiniteTensor, match="wide"):
        codec(spec).encode(torch.tensor([1e300], dtype=torch.float64), "wide")


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.bool, torch.complex64])
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    with pytest.raises(CodecError, match=r"tensor position_ids is torch\..*not floating point"):
        codec("bf16").encode(torch.zeros(3, dtype=dtype), "position_ids")


def test_more_dimensions_than_a_decoder_takes_are_refused_at_the_encoder() -> None:
    assert Codec.decode(codec("fp32").encode(torch.zeros((1,) * 16))).dim() == 16
    with pytest.raises(CodecError, match="deep has 17 dimensions"):
        codec("fp32").encode(torch.zeros((1,) * 17), "deep")


def test_what_would_grow_is_stored_raw() -> None:
    for size in (1, 2, 4, 7):
        blob = codec("topk(density=1.0,chunk=4096)|fp32").encode(noise(size))
        assert Codec.inspect(blob).spec == "fp32"
        assert torch.equal(Codec.decode(blob), noise(size))
    # The name of the codec is part of what grows.
    assert Codec.inspect(codec("int8(block=256)").encode(noise(5))).spec == "fp32"
    assert Codec.inspect(codec("int8(block=256)").encode(noise(6))).spec == "int8(block=256)"


@pytest.mark.parametrize("spec", SPECS)
def test_no_tensor_is_larger_than_raw(spec: str) -> None:
    for size in [*range(70), 255, 256, 257, 1000, 4095]:
        for tensor in (noise(size), torch.ones(size), torch.zeros(1, size, 1)):
            assert len(codec(spec).encode(tensor)) <= len(codec("fp32").encode(tensor))


@pytest.mark.parametrize("spec", ["fp32|zstd", "bf16|zstd", "int4|zstd", "topk(density=0.3)|zstd"])
def test_what_packing_does_not_shrink_is_not_packed(spec: str) -> None:
    noise_bits = torch.randint(0, 2**31 - 2**24, (5000,), dtype=torch.int32).view(torch.float32)
    for tensor in (torch.tensor(1.0), noise(9), noise_bits):
        blob = codec(spec).encode(tensor)
        plain = codec(spec.removesuffix("|zstd")).encode(tensor)
        assert len(blob) <= len(plain) and torch.equal(Codec.decode(blob), Codec.decode(plain))
        assert "zstd" not in Codec.inspect(blob).spec or len(blob) < len(plain)
    assert "zstd" not in Codec.inspect(codec(spec).encode(noise(3))).spec


@pytest.mark.parametrize(
    "spec",
    ["fp32|zstd", "int4|zstd", "topk(density=0.01)|int2|zstd", "topk(density=1e-6,chunk=16777216)"],
)
def test_a_huge_tensor_of_zeros_decodes_without_a_stated_shape(spec: str) -> None:
    count = 6_000_000
    blob = codec(spec).encode(torch.zeros(count))
    assert count / 4096 <= len(blob) < count / 1000
    back = Codec.decode(blob)
    assert back.numel() == count and not bool(back.any())


def test_what_is_not_dense_is_refused_by_name() -> None:
    for tensor in (torch.eye(3).to_sparse(), torch.zeros(3, device="meta")):
        with pytest.raises(CodecError, match=r"tensor gate is .*only dense tensors"):
            codec("fp32").encode(tensor, "gate")
    negated = torch.randn(3, dtype=torch.complex64).conj().imag
    assert torch.equal(Codec.decode(codec("fp32").encode(negated)), negated)


def test_a_million_values_take_less_than_a_quarter_bit_each() -> None:
    tensor = noise(1000, 1000)
    blob = codec("topk(density=0.0156,chunk=4096)|int2(block=64)").encode(tensor)
    assert 8 * len(blob) / tensor.numel() < 0.25
    back = Codec.decode(blob)
    assert int((back != 0).sum()) == 244 * 64 + round(0.0156 * (1_000_000 - 244 * 4096))


def test_ties_give_exactly_k() -> None:
    blob = codec("topk(density=0.03,chunk=4096)|int8(block=256)").encode(torch.ones(3 * 4096))
    assert int((Codec.decode(blob) != 0).sum()) == 3 * round(0.03 * 4096)


def test_an_outlier_spoils_no_other_block() -> None:
    tensor = noise(64, 256)
    tensor[7, 3] = 1e4
    back = Codec.decode(codec("int8(block=256)").encode(tensor))
    rows = torch.arange(64) != 7
    assert relative_error(back[rows], tensor[rows]) < 0.01
    assert abs(float(back[7, 3]) - 1e4) < 1


def test_the_layout_of_a_blob_is_frozen() -> None:
    blob = codec("bf16").encode(torch.tensor([[1.0, -2.0, 0.5]]))
    rest = b"\x00\x02\x04bf16" + struct.pack("<2Q", 1, 3) + bytes.fromhex("803f00c0003f")
    assert blob == seal(rest)
    assert blob == forge("bf16", (1, 3), bytes.fromhex("803f00c0003f"))
    assert payload_of(codec("int8(block=8)").encode(torch.tensor(1.0))).hex() == "0000803f"
    nine = torch.tensor([127.0, -127, 1, 0, 2, 3, 4, 5, 64])
    assert payload_of(codec("int8(block=8)").encode(nine)).hex() == (
        "0000803f" + "0402013f" + "7f810100020304057f"
    )
    sixteen = torch.zeros(16)
    sixteen[5], sixteen[9] = -7, 3.5
    assert payload_of(
        codec("topk(density=0.125,chunk=16)|int4(block=8)").encode(sixteen)
    ).hex() == ("95" + "0000803f" + "b0")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_decode_gives_the_dtype_asked_for(dtype: torch.dtype) -> None:
    blob = codec("int8").encode(noise(5000))
    back = Codec.decode(blob, dtype=dtype)
    assert back.dtype == dtype
    assert torch.equal(back, Codec.decode(blob).to(dtype))


def test_decode_takes_any_bytes_and_gives_memory_of_its_own() -> None:
    blob = codec("fp32").encode(noise(100))
    for each in (blob, memoryview(blob), memoryview(bytearray(blob))):
        back = Codec.decode(each)
        back += 1
        assert torch.equal(Codec.decode(blob), noise(100))


def test_a_stated_shape_must_match() -> None:
    blob = codec("int8").encode(noise(30, 40))
    assert Codec.decode(blob, shape=(30, 40)).shape == (30, 40)
    assert Codec.decode(blob, shape=torch.Size([30, 40])).shape == (30, 40)
    for shape in [(40, 30), (1200,), (30, 40, 1), ()]:
        with pytest.raises(CorruptPayload, match=r"holds shape \[30, 40\]"):
            Codec.decode(blob, shape=shape)
        with pytest.raises(CorruptPayload, match=r"holds shape \[30, 40\]"):
            Codec.add_into(blob, torch.zeros(shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 4097, 300_000])
@pytest.mark.parametrize("spec", SPECS)
def test_add_into_is_decode_and_add(spec: str, size: int, dtype: torch.dtype) -> None:
    blob = codec(spec).encode(noise(size))
    start = noise(size, seed=1).to(dtype)
    out = start.clone()
    Codec.add_into(blob, out, -0.3)
    wanted = start.double() - 0.3 * Codec.decode(blob).double()
    eps = torch.finfo(dtype).eps
    assert torch.allclose(out.double(), wanted, rtol=2 * eps, atol=2 * eps)


def test_add_into_twice_counts_twice_and_writes_through_views() -> None:
    blob = codec("topk(density=0.1,chunk=100)|bf16").encode(noise(40, 50))
    out = torch.zeros(3, 40, 50)
    for _ in range(2):
        Codec.add_into(blob, out[1])
    assert torch.equal(out[1], 2 * Codec.decode(blob))
    assert not bool(out[0].any()) and not bool(out[2].any())


def test_add_into_refuses_what_it_cannot_add_to() -> None:
    blob = codec("fp32").encode(noise(4, 4))
    for out in (torch.zeros(4, 4).T[:, ::2], torch.zeros(4, 4, dtype=torch.bfloat16)):
        with pytest.raises(CodecError, match="contiguous fp32 or fp64 CPU tensor"):
            Codec.add_into(blob, out)
    leaf = torch.nn.Parameter(torch.zeros(4, 4))
    Codec.add_into(blob, leaf)
    assert torch.equal(leaf.detach(), noise(4, 4))


def test_adding_a_sparse_blob_builds_no_dense_copy() -> None:
    blob = codec("topk(density=0.001,chunk=4096)|int8(block=256)").encode(noise(1 << 21))
    out = torch.zeros(1 << 21)
    with allocating_at_most(1 << 20):
        Codec.add_into(blob, out)
    assert int((out != 0).sum()) == 4 * 512


def test_adding_a_dense_blob_goes_piece_by_piece() -> None:
    for spec in ("int8", "int4", "int2", "bf16", "fp16", "fp32"):
        blob = codec(spec).encode(noise(1 << 21))
        with allocating_at_most(7 << 20):  # a dense copy would take 8 MiB
            Codec.add_into(blob, torch.zeros(1 << 21))


@pytest.mark.parametrize(
    ("spec", "bytes_a_value"),
    [
        ("fp32", 4), ("bf16", 2), ("int8", 1.1), ("int2", 0.5), ("sign", 0.2), ("fp32|zstd", 8),
        ("int8|zstd", 3.1), ("topk(density=0.01)|int8", 0.3), ("randk(density=0.01)|int8", 0.4),
    ],
)  # fmt: skip
def test_encoding_takes_little_more_than_the_blob(spec: str, bytes_a_value: float) -> None:
    count = 1 << 22
    tensor = noise(count)
    with allocating_at_most(int(bytes_a_value * count) + (7 << 20)):
        codec(spec).encode(tensor)


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_add_into_refuses_a_weight_that_is_not_finite(weight: float) -> None:
    out = torch.zeros(4)
    with pytest.raises(CodecError, match="weight"):
        Codec.add_into(codec("fp32").encode(torch.ones(4)), out, weight)
    assert torch.equal(out, torch.zeros(4))


@pytest.mark.parametrize("spec", ["fp32", "int8(block=256)", "sign", "topk(density=0.1)|int2|zstd"])
def test_of_a_tensor_of_zeros_no_values_are_stored(spec: str) -> None:
    zeros = torch.zeros(512, 1024)
    blob = codec(spec).encode(zeros)
    assert Codec.inspect(blob).spec == "zero" and len(blob) < 64 + 512 * 1024 // 4096
    assert torch.equal(Codec.decode(blob, shape=(512, 1024)), zeros)
    into = torch.ones(512, 1024)
    Codec.add_into(blob, into, 3.0)
    assert torch.equal(into, torch.ones(512, 1024))


def test_a_single_value_or_a_negative_zero_is_stored() -> None:
    late = torch.zeros(8192)
    late[-1] = 1.0
    assert torch.equal(Codec.decode(codec("fp32").encode(late)), late)
    negative = codec("fp32").encode(-torch.zeros(8192))
    assert bool(torch.signbit(Codec.decode(negative)).all())


def test_nobody_sends_anything_under_the_codec_of_zeros() -> None:
    with pytest.raises(CodecError, match="zeros only"):
        codec("zero").encode(torch.ones(8192), "w")
