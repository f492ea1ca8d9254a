"""Codecs of a user's own: how to write and register one, and what holds for it then.

``Ternary`` is an example to start from: a frozen dataclass with a canonical spec,
an exact size for any number of values, and an ``encode`` and ``pieces`` that are
each other's inverse.  ``EveryOther`` is a selection, ``Deflate`` a packer.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from flower_geo.compression import Codec, codec, pack, register, unpack
from flower_geo.compression.lossless import Section
from flower_geo.compression.spec import _STAGES, chain
from flower_geo.errors import CodecError, CodecSpecError, CorruptPayload
from tests.compression.blobs import forge, noise


@dataclass(frozen=True)
class Ternary:
    """Sign and a common magnitude, a byte a value: what a user might write."""

    share: float
    name: ClassVar[str] = "ternary"
    lossless: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return f"ternary(share={self.share!r})"

    def size(self, count: int) -> int:
        return 4 + count

    def encode(self, values: NDArray[np.float32]) -> bytes:
        size = np.abs(values)
        keep = size >= self.share * size.max(initial=0)
        level = size[keep].mean() if keep.any() else np.float32(0)
        signs = (np.sign(values) * keep).astype(np.int8)
        return bytes(np.float32(level).tobytes() + signs.tobytes())

    def pieces(self, payload: memoryview, count: int) -> Iterator[tuple[int, NDArray[np.float32]]]:
        level = np.frombuffer(payload[:4], dtype="<f4")[0]
        yield 0, np.frombuffer(payload[4:], dtype=np.int8).astype(np.float32) * level


@dataclass(frozen=True)
class EveryOther:
    """A selection without any index table."""

    @property
    def spec(self) -> str:
        return "everyother"

    def kept(self, count: int) -> int:
        return (count + 1) // 2

    def index_size(self, count: int) -> int:
        return 0

    def select(self, values: NDArray[np.float32]) -> NDArray[np.int64]:
        return np.arange(0, values.size, 2)

    def pack(self, indices: NDArray[np.int64], count: int) -> bytes:
        return b""

    def unpack(self, data: memoryview, count: int) -> NDArray[np.int64]:
        return np.arange(0, count, 2)


@dataclass(frozen=True)
class Deflate:
    """A packer; the length of what it packed is 4 bytes at its front."""

    spec: ClassVar[str] = "deflate"

    def fewest(self, sections: Sequence[Section]) -> int:
        return 4

    def pack(self, payload: memoryview, sections: Sequence[Section]) -> list[bytes]:
        packed = zlib.compress(payload)
        return [len(packed).to_bytes(4, "little"), packed]

    def unpack(self, data: memoryview, sections: Sequence[Section]) -> tuple[memoryview, int]:
        size, used = sum(n for n, _ in sections), 4 + int.from_bytes(data[:4], "little")
        machine = zlib.decompressobj()
        try:
            plain = machine.decompress(data[4:used], size)  # never more than is wanted
        except zlib.error as error:
            raise CorruptPayload(f"a deflate stream cannot be read: {error}") from None
        if len(plain) != size or not machine.eof or machine.unused_data or used > len(data):
            raise CorruptPayload(f"a deflate stream does not hold {size} bytes")
        return memoryview(plain), used


@pytest.fixture
def own_codecs() -> Iterator[None]:
    before = dict(_STAGES)
    register("ternary", Ternary, {"share": float}, share=0.5)
    register("everyother", EveryOther, {})
    register("deflate", Deflate, {})
    yield
    _STAGES.clear()
    _STAGES.update(before)
    chain.cache_clear()


@pytest.mark.usefixtures("own_codecs")
def test_a_codec_of_a_users_own_works_everywhere() -> None:
    tensor = noise(40, 50)
    mine = codec("ternary(share=0.25)")
    assert mine.spec == "ternary(share=0.25)" and codec("ternary").spec == "ternary(share=0.5)"
    blob = mine.encode(tensor)
    assert Codec.inspect(blob).spec == mine.spec
    back = Codec.decode(blob)
    assert back.shape == (40, 50) and len(set(back.abs().view(-1).tolist())) == 2
    assert bool((back * tensor >= 0).all())
    out = torch.zeros(40, 50)
    Codec.add_into(blob, out, 2.0)
    assert torch.equal(out, 2 * back)
    state = {"a.bias": noise(9), "w": tensor}
    record = pack(state, codec("*.bias=fp32; *=topk(density=0.5,chunk=64)|ternary"))
    assert torch.equal(unpack(record)["a.bias"], state["a.bias"])
    assert int((unpack(record)["w"] != 0).sum()) <= 1000
    with pytest.raises(CorruptPayload):
        Codec.decode(forge("ternary(share=0.25)", (40, 50), bytes(2003)))
    with pytest.raises(CodecSpecError, match="did you mean 'ternary'"):
        codec("ternery")


@pytest.mark.usefixtures("own_codecs")
def test_a_selection_of_a_users_own_comes_first_in_a_chain() -> None:
    tensor = noise(1001)
    back = Codec.decode(codec("everyother|fp32").encode(tensor))
    assert torch.equal(back[::2], tensor[::2]) and not bool(back[1::2].any())
    assert codec("everyother").spec == "everyother|fp32"
    with pytest.raises(CodecSpecError, match="a selection"):
        codec("int8|everyother")


@pytest.mark.usefixtures("own_codecs")
def test_chains_of_a_users_own_and_the_built_in_stages() -> None:
    tensor = noise(3, 9).repeat(20, 7)
    for mine, plain in [
        ("ternary|zstd", "ternary"),
        ("everyother|ternary|zstd", "everyother|ternary"),
        ("int8|deflate", "int8"),
        ("topk(density=0.9)|ternary|deflate", "topk(density=0.9)|ternary"),
        ("randk(density=0.5)|ternary|deflate", "randk(density=0.5)|ternary"),
    ]:
        blob = codec(mine).encode(tensor)
        assert Codec.inspect(blob).spec == codec(mine).spec
        assert len(blob) < len(codec(plain).encode(tensor))
        assert torch.equal(Codec.decode(blob), Codec.decode(codec(plain).encode(tensor)))
    zeros = codec("int8|deflate").encode(torch.zeros(5_000_000))
    assert len(zeros) > 5_000_000 / 4096 and not bool(Codec.decode(zeros).any())
    with pytest.raises(CodecSpecError, match="zstd and deflate are each a packer"):
        codec("zstd|deflate")
    with pytest.raises(CodecSpecError, match=r"right order is 'everyother\|ternary\|deflate'"):
        codec("deflate|ternary|everyother")


class TooShort(Ternary):
    def encode(self, values: NDArray[np.float32]) -> bytes:
        return super().encode(values)[:-1]


def test_an_encoder_that_breaks_its_own_word_is_told_so() -> None:
    with pytest.raises(
        CodecError, match=r"made 2003 bytes of 2000 values and its size\(\) says 2004"
    ):
        Codec(TooShort(0.5)).encode(noise(2000))


def test_what_is_no_stage_is_refused_when_it_is_named() -> None:
    before = dict(_STAGES)
    register("nothing", object, {})
    register("endless", lambda: Ternary(int("9" * 250)), {})
    try:
        with pytest.raises(CodecSpecError, match="is no stage of a chain; it needs the members"):
            codec("nothing")
        with pytest.raises(CodecSpecError, match="too long when its defaults are written"):
            codec("endless")
    finally:
        _STAGES.clear()
        _STAGES.update(before)
        chain.cache_clear()


def test_blobs_of_a_codec_that_is_not_registered_are_refused() -> None:
    with pytest.raises(CorruptPayload, match="codec is not known"):
        Codec.decode(forge("ternary(share=0.25)", (40, 50), bytes(2004)))


def test_a_name_no_spec_can_hold_is_refused() -> None:
    for name in ("Int3", "a|b", "", "a b", "3bit"):
        with pytest.raises(CodecError, match="is not lower-case"):
            register(name, Ternary, {})
        assert name not in _STAGES
