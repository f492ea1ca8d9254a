"""Spec strings: what is accepted, what a typo is told, rules, codecs of a user's own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from flower_geo.compression import Codec, codec, pack, register, unpack
from flower_geo.compression.spec import _STAGES, Rules, chain
from flower_geo.errors import CodecError, CodecSpecError, CorruptPayload
from tests.compression.blobs import SPECS, forge, noise


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("int8", "int8(block=256)"),
        (" int4 ( block = 32 ) ".replace(" (", "("), "int4(block=32)"),
        ("int2()", "int2(block=64)"),
        ("topk(density=.0156)|int2", "topk(density=0.0156,chunk=4096)|int2(block=64)"),
        ("topk(chunk=64, density=5e-1)", "topk(density=0.5,chunk=64)|fp32"),
        ("topk(density=1e-5)|bf16", "topk(density=1e-05,chunk=4096)|bf16"),
        ("*.bias , *.ln_*=bf16;*=int8", "*.bias,*.ln_*=bf16; *=int8(block=256)"),
        ("h.[0-3].*=topk(density=0.1)|int8;*=fp32",
         "h.[0-3].*=topk(density=0.1,chunk=4096)|int8(block=256); *=fp32"),
    ],
)  # fmt: skip
def test_the_canonical_spec_parses_to_an_equal_codec(given: str, canonical: str) -> None:
    parsed = codec(given)
    assert parsed.spec == canonical
    assert codec(parsed.spec) == parsed


def stages() -> st.SearchStrategy[str]:
    values = st.sampled_from(["fp32", "bf16", "fp16"]) | st.builds(
        "int{}(block={})".format, st.sampled_from([2, 4, 8]), st.integers(8, 1 << 20)
    )
    topk = st.builds(
        "topk(density={!r},chunk={})".format,
        st.floats(1e-6, 1.0),
        st.integers(16, 1 << 24),
    )
    return values | st.builds("{}|{}".format, topk, values)


@given(spec=stages())
def test_any_chain_is_its_own_canonical_spec(spec: str) -> None:
    assert codec(spec).spec == spec
    blob = codec(spec).encode(noise(300))
    assert Codec.inspect(blob).spec in (spec, "fp32")


@given(
    names=st.lists(st.sampled_from(["a.bias", "*.ln_*", "h.?.w", "[!x]*"]), min_size=1),
    spec=stages(),
)
def test_any_rules_are_their_own_canonical_spec(names: list[str], spec: str) -> None:
    text = f"{','.join(names)}={spec}; *=bf16"
    assert codec(text).spec == text and codec(codec(text).spec) == codec(text)


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("int9", "codec 'int9' is not known, did you mean 'int8'"),
        ("fp23", "did you mean 'fp32'"),
        ("TopK(density=0.1)", "did you mean 'topk'"),
        ("topkk(density=0.1)", "did you mean 'topk'"),
        ("quantum", "known: bf16, fp16, fp32"),
        (
            "topk(densty=0.1)",
            "topk has no 'densty', did you mean 'density'? (keys: density, chunk)",
        ),
        ("int8(blocks=64)", "did you mean 'block'"),
        ("int8(64)", "int8 has no '64'"),
        ("fp32(block=3)", "(keys: none)"),
        ("topk", "topk needs density="),
        ("topk(density=0)", "must be above 0 and at most 1"),
        ("topk(density=1.5)", "must be above 0 and at most 1"),
        ("topk(density=nan)", "must be above 0 and at most 1"),
        ("topk(density=many)", "topk density='many'"),
        ("topk(density=0.1,chunk=15)", "must be from 16 to 16777216"),
        ("topk(density=0.1,density=0.2)", "density= is given twice"),
        ("int8(block=7)", "must be from 8 to 1048576"),
        ("int8(block=1.5)", "int8 block='1.5'"),
        ("int8|topk(density=0.1)", "a selection (topk), then one value codec"),
        ("int8|int4", "a selection (topk), then one value codec"),
        ("topk(density=0.1)|topk(density=0.1)", "a selection (topk), then one value codec"),
        ("", "not of the form name"),
        ("int8|", "not of the form name"),
        ("int8(block=8", "not of the form"),
        ("int8)block=8(", "not of the form"),
        ("int8 int4", "not of the form"),
        ("ínt8", "not ASCII"),
        ("int8(block=256," + " " * 300 + ")", "too long"),
        ("*.bias=bf16; int8", "not of the form 'pattern=codec'"),
        ("*=bf16;", "not of the form 'pattern=codec'"),
        ("=bf16", "not of the form 'pattern=codec'"),
        ("a,,b=bf16", "an empty pattern"),
        ("*=int9", "did you mean 'int8'"),
        ("*=*=bf16", "not of the form"),
    ],
)
def test_a_typo_is_told_in_one_line(spec: str, told: str) -> None:
    with pytest.raises(CodecSpecError) as caught:
        codec(spec)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


@given(spec=st.text(max_size=30) | st.text("intbf1248tokpdensity()=|,;* .", max_size=40))
def test_any_text_is_a_codec_or_refused(spec: str) -> None:
    try:
        parsed = codec(spec)
    except CodecSpecError:
        return
    assert codec(parsed.spec) == parsed


def test_lossless() -> None:
    lossless = {spec for spec in SPECS if codec(spec).lossless}
    assert lossless == {"fp32"}
    assert codec("a=fp32; *=fp32").lossless
    assert not codec("a=fp32; *=bf16").lossless


def test_the_first_rule_that_matches_holds() -> None:
    rules = codec("*.bias,*.ln_*=bf16; h.0.*=fp32; *=int8(block=256)")
    assert isinstance(rules, Rules)
    chosen = {
        name: rules.for_tensor(name).spec
        for name in ("h.0.bias", "h.0.ln_1.weight", "h.0.mlp", "h.1.mlp", "wte", "H.0.BIAS")
    }
    assert chosen == {
        "h.0.bias": "bf16", "h.0.ln_1.weight": "bf16", "h.0.mlp": "fp32",
        "h.1.mlp": "int8(block=256)", "wte": "int8(block=256)", "H.0.BIAS": "int8(block=256)",
    }  # fmt: skip
    assert Codec.inspect(rules.encode(noise(100), name="h.1.bias")).spec == "bf16"
    assert Codec.inspect(rules.encode(noise(100), name="wte")).spec == "int8(block=256)"


def test_a_tensor_no_rule_matches_is_named() -> None:
    with pytest.raises(CodecSpecError, match=r"matches tensor 'wte'; end the rules with"):
        codec("*.bias=bf16").encode(noise(3), name="wte")


def test_a_codec_is_a_codec_for_every_name() -> None:
    chosen = codec("bf16")
    assert isinstance(chosen, Codec)
    assert chosen.for_tensor("any") is chosen


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


@pytest.fixture
def own_codecs() -> Iterator[None]:
    before = dict(_STAGES)
    register("ternary", Ternary, {"share": float}, share=0.5)
    register("everyother", EveryOther, {})
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


def test_blobs_of_a_codec_that_is_not_registered_are_refused() -> None:
    with pytest.raises(CorruptPayload, match="codec is not known"):
        Codec.decode(forge("ternary(share=0.25)", (40, 50), bytes(2004)))


def test_a_name_no_spec_can_hold_is_refused() -> None:
    for name in ("Int3", "a|b", "", "a b", "3bit"):
        with pytest.raises(CodecError, match="is not lower-case"):
            register(name, Ternary, {})
        assert name not in _STAGES
