"""What holds for every codec and every tensor, and how wrong each codec may be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_geo.compression import Codec, codec
from flower_geo.errors import NonFiniteTensor
from tests.compression.blobs import SPECS, noise

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "wide": lambda x: x * (20 * x.flip(0)).exp(),
    "tiny": lambda x: x * 1e-42,
    "large": lambda x: x * 5e36,
    "few": lambda x: (2 * x).round(),
    "mostly zeros": lambda x: torch.where(x > 1.5, x, torch.zeros(())),
    "ones": torch.ones_like,
    "minus zeros": lambda x: -torch.zeros_like(x),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.movedim(0, -1) if x.dim() else x,
    "every other": lambda x: x[..., ::2] if x.dim() else x,
    "expanded": lambda x: x[:1].expand(x.shape) if x.dim() and x.shape[0] else x,
    "offset": lambda x: torch.cat([torch.ones(3, dtype=x.dtype), x.reshape(-1)])[3:].view(x.shape),
}


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]))
    shape = draw(
        st.lists(st.integers(0, 9), max_size=5)
        | st.lists(st.integers(1, 70), min_size=1, max_size=2)
        | st.builds(lambda n: [n], st.sampled_from([255, 256, 257, 4095, 4096, 4097, 9000]))
    )
    kind = draw(st.sampled_from(list(KINDS)))
    flat = KINDS[kind](noise(torch.Size(shape).numel(), seed=draw(st.integers(0, 99))))
    # numbers that the narrower dtypes cannot hold become their largest
    largest = torch.finfo(dtype).max
    narrow = flat.double().clamp(-largest, largest).to(dtype).reshape(shape)
    return LAYOUTS[draw(st.sampled_from(list(LAYOUTS)))](narrow)


@given(spec=st.sampled_from(SPECS), tensor=tensors())
@settings(max_examples=200)
def test_every_codec_takes_every_tensor(spec: str, tensor: Tensor) -> None:
    chosen, before = codec(spec), tensor.clone()
    try:
        blob = chosen.encode(tensor)
    except NonFiniteTensor:
        assert "scale=true" in spec and float(tensor.abs().max()) > 1e37
        return
    back = Codec.decode(blob)
    assert torch.equal(tensor, before) and chosen.encode(tensor.clone()) == blob
    assert back.shape == tensor.shape and bool(torch.isfinite(back).all())
    assert torch.equal(back, Codec.decode(blob, shape=tuple(tensor.shape)))
    assert len(blob) <= len(codec("fp32").encode(tensor))
    info = Codec.inspect(blob)
    assert info.shape == tensor.shape and info.dtype == tensor.dtype
    unpacked = chosen.spec.split("|zstd")[0]
    assert info.spec in (chosen.spec, unpacked, "zero") or info.spec.startswith("fp32")
    if codec(info.spec).lossless:
        assert torch.equal(back, tensor.float())
    # two magnitudes and a sign have no zero, not even behind top-k where it had to take zeros
    assert not bool(back[tensor == 0].any()) or "sign" in info.spec or "int2" in info.spec
    if "topk" not in info.spec and "randk" not in info.spec:
        assert bool((back * tensor.sign().float() >= 0).all())
    out = torch.ones(tensor.shape, dtype=torch.float64)
    Codec.add_into(blob, out, -2.0)
    assert torch.equal(out, 1 - 2 * back.double())


EXACT_AGAIN = [
    "fp32", "bf16", "fp16", "sign(block=64)", "sign(block=9,scale=fp32)", "topk(density=0.1)|fp32",
    "topk(density=0.3,chunk=64)|bf16", "fp32|zstd", "bf16|zstd", "sign(block=32)|zstd",
    "topk(density=0.1)|bf16|zstd",
]  # fmt: skip


@given(spec=st.sampled_from(EXACT_AGAIN), tensor=tensors())
@settings(max_examples=100)
def test_what_was_decoded_comes_back_to_the_bit(spec: str, tensor: Tensor) -> None:
    once = Codec.decode(codec(spec).encode(tensor))
    again = Codec.decode(codec(spec).encode(once))
    assert torch.equal(again, once)


def blocks(tensor: Tensor, block: int) -> list[Tensor]:
    return list(torch.split(tensor.double().view(-1), block))


SOURCES = [noise(5000), noise(5000) * noise(5000, seed=1).exp(), noise(4097).round()]


@pytest.mark.parametrize("zstd", ["", "|zstd"])
@pytest.mark.parametrize("source", SOURCES)
def test_half_precision_is_off_by_half_a_step(source: Tensor, zstd: str) -> None:
    for spec, step in (("bf16", 2.0**-8), ("fp16", 2.0**-11)):
        back = Codec.decode(codec(spec + zstd).encode(source))
        floor = 0.0 if spec == "bf16" else float(source.abs().max()) * 2.0**-39
        assert bool(((back - source).abs() <= step * source.abs() + floor).all())


@pytest.mark.parametrize("zstd", ["", "|zstd"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("bits", "block"), [(8, 256), (8, 9), (4, 64), (4, 1000)])
def test_integers_are_off_by_half_a_step_of_their_block(
    bits: int, block: int, source: Tensor, zstd: str
) -> None:
    back = Codec.decode(codec(f"int{bits}(block={block}){zstd}").encode(source))
    for x, y in zip(blocks(source, block), blocks(back, block), strict=True):
        half = x.abs().max() / (2 ** (bits - 1) - 1) / 2
        assert bool(((x - y).abs() <= half * (1 + 1e-5)).all())


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("block", [8, 64, 999])
def test_two_bits_are_never_worse_than_one(block: int, source: Tensor) -> None:
    # Two magnitudes, each the mean of its group, against the one of scaled signs
    back = Codec.decode(codec(f"int2(block={block})").encode(source))
    for x, y in zip(blocks(source, block), blocks(back, block), strict=True):
        one = x.square().sum() - x.abs().sum() ** 2 / x.numel()
        rounding = x.square().sum() * 2.0**-16
        assert float((x - y).square().sum()) <= float(one + rounding) + 1e-30


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(("density", "chunk"), [(0.03, 4096), (0.5, 64), (0.9, 17)])
def test_top_k_loses_the_smallest(density: float, chunk: int, source: Tensor) -> None:
    back = Codec.decode(codec(f"topk(density={density},chunk={chunk})").encode(source))
    for x, y in zip(blocks(source, chunk), blocks(back, chunk), strict=True):
        lost = x.numel() - max(1, round(density * x.numel()))
        least = x.abs().sort().values[:lost].square().sum()
        assert float((x - y).square().sum()) == pytest.approx(float(least), rel=1e-9)
        assert float(least) <= lost / x.numel() * float(x.square().sum()) + 1e-9


@pytest.mark.parametrize("values", ["int8(block=256)", "int4(block=64)", "int2(block=64)", "bf16"])
@pytest.mark.parametrize("selection", ["topk(density=0.1,chunk=4096)", "randk(density=0.1,seed=5)"])
def test_a_chain_is_as_wrong_as_its_stages_together(selection: str, values: str) -> None:
    source = noise(50_000)
    kept = Codec.decode(codec(f"{selection}|fp32").encode(source))
    both = Codec.decode(codec(f"{selection}|{values}").encode(source))
    where = kept != 0
    assert not bool(both[~where].any())
    alone = Codec.decode(codec(values).encode(kept[where]))
    assert torch.equal(both[where], alone)
    lost = (source - kept).square().sum() + (kept[where] - alone).square().sum()
    assert float((source - both).square().sum()) == pytest.approx(float(lost), rel=1e-5)
