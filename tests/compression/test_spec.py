"""Spec strings: what is accepted, what a typo is told, rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.compression import Codec, codec
from flower_geo.compression.spec import Rules
from flower_geo.errors import CodecSpecError
from tests.compression.blobs import SPECS, noise


@pytest.mark.parametrize(
    ("given", "canonical"),
    [
        ("int8", "int8(block=256)"),
        (" int4 ( block = 32 ) ".replace(" (", "("), "int4(block=32)"),
        ("int2()", "int2(block=64)"),
        ("topk(density=.0156)|int2", "topk(density=0.0156,chunk=4096)|int2(block=64)"),
        ("topk(chunk=64, density=5e-1)", "topk(density=0.5,chunk=64)|fp32"),
        ("topk(density=1e-5)|bf16", "topk(density=1e-05,chunk=4096)|bf16"),
        ("zstd", "fp32|zstd(level=3)"),
        ("topk(density=1)|zstd", "topk(density=1.0,chunk=4096)|fp32|zstd(level=3)"),
        ("topk(density=0.5)|int4|zstd(level=19)",
         "topk(density=0.5,chunk=4096)|int4(block=64)|zstd(level=19)"),
        ("int8(scale=fp32,round=nearest,seed=0)", "int8(block=256)"),
        ("int4(scale=bf16,seed=3,round=stochastic)|zstd",
         "int4(block=64,round=stochastic,seed=3,scale=bf16)|zstd(level=3)"),
        ("sign(scale=bf16)", "sign(block=256)"),
        ("sign(scale=fp32,block=8)", "sign(block=8,scale=fp32)"),
        ("randk(density=0.01)", "randk(density=0.01,seed=0)|fp32"),
        ("randk(scale=true,density=1,seed=9223372036854775807)|sign|zstd",
         "randk(density=1.0,seed=9223372036854775807,scale=true)|sign(block=256)|zstd(level=3)"),
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
    values |= st.builds("sign(block={}{})".format, st.integers(8, 99), st.sampled_from(FP32_MEANS))
    topk = st.builds(
        "topk(density={!r},chunk={})|".format, st.floats(1e-6, 1.0), st.integers(16, 1 << 24)
    )
    randk = st.builds(
        "randk(density={!r},seed={}{})|".format,
        st.floats(1e-6, 1.0),
        st.integers(0, 2**63 - 1),
        st.sampled_from(["", ",scale=true"]),
    )
    zstd = st.builds("|zstd(level={})".format, st.integers(1, 19))
    return st.builds("{}{}{}".format, st.just("") | topk | randk, values, st.just("") | zstd)


FP32_MEANS = ["", ",scale=fp32"]


@given(spec=stages())
def test_any_chain_is_its_own_canonical_spec(spec: str) -> None:
    assert codec(spec).spec == spec
    blob = codec(spec).encode(noise(300))
    found, packer = Codec.inspect(blob).spec, spec.partition("|zstd")[2]
    assert found in (spec, spec.partition("|zstd")[0], "fp32", f"fp32|zstd{packer}")


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
            "topk has no 'densty', did you mean 'density'? (keys: density, chunk, index)",
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
        ("int8|topk(density=0.1)", "the right order is 'topk(density=0.1)|int8'"),
        ("int8|int4", "int8 and int4 are each a value codec"),
        ("topk(density=0.1)|topk(density=0.1)", "are each a selection; a chain has at most one"),
        ("", "not of the form name"),
        ("int8|", "not of the form name"),
        ("zstd|int8", "a packer last: the right order is 'int8|zstd'"),
        ("zstd(level=9)|topk(density=0.1)", "right order is 'topk(density=0.1)|zstd(level=9)'"),
        ("int8|zstd|topk(density=0.1)", "the right order is 'topk(density=0.1)|int8|zstd'"),
        ("zstd|zstd", "zstd and zstd are each a packer; a chain has at most one selection"),
        ("topk(density=0.1)|randk(density=0.1)|int8", "are each a selection"),
        ("fp32|bf16|int8", "fp32 and bf16 and int8 are each a value codec"),
        ("|".join(["bf16"] * 40), "are each a value codec; a chain has at most one"),
        ("|".join(["zstd"] * 100), "too long"),
        ("(" * 150, "not of the form"),
        ("zstd(level=0)", "must be from 1 to 19"),
        ("zstd(level=20)", "must be from 1 to 19"),
        ("int8(round=up)", "must be nearest or stochastic"),
        ("int8(scale=fp16)", "must be fp32 or bf16"),
        ("int8(seed=3)", "seed= is for round=stochastic"),
        ("sign(block=7)", "must be from 8 to"),
        ("sign(scale=fp16)", "must be bf16 or fp32"),
        ("randk", "randk needs density="),
        ("randk(density=0.1,seed=-1)", "must be from 0 to 9223372036854775807"),
        ("randk(density=0.1,scale=yes)", "must be true or false"),
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
    assert lossless == {"fp32", "fp32|zstd(level=3)"}
    assert codec("a=fp32; *=zstd").lossless
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


def test_rules_of_any_length_are_read_or_refused_at_once() -> None:
    for text in ("=" * 99_999, "(" * 99_999, "a" + " " * 90_000 + "=(", "a=b|" * 20_000, "=;" * 9):
        with pytest.raises(CodecSpecError) as caught:
            codec(text)
        assert len(str(caught.value)) < 400
    with pytest.raises(CodecSpecError, match="too long: 100001 characters"):
        codec("x" * 100_001)
    many = codec("; ".join(f"h.{layer}.*=bf16" for layer in range(1000)))
    assert many.for_tensor("h.999.w").spec == "bf16"
