"""Blobs nobody should trust: refused as corrupt or harmless, nothing else, nothing big.

Most carry a right checksum, so that the checks behind it are what refuses them.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flower_geo.compression import Codec, codec
from flower_geo.compression.codec import MAX_VALUES_PER_BYTE
from flower_geo.errors import CorruptPayload
from tests.compression.blobs import (
    FIXED,
    MAGIC,
    SPECS,
    allocating_at_most,
    forge,
    noise,
    payload_of,
    seal,
)

#: Blobs of each codec, of values alike enough for zstd to find something.
SMALL = {spec: codec(spec).encode(noise(3, 10).repeat(1, 7)) for spec in SPECS}


def refused(blob: bytes) -> None:
    """Every reader refuses, whether it knows the shape or not."""
    with pytest.raises(CorruptPayload):
        Codec.decode(blob)
    with pytest.raises(CorruptPayload):
        Codec.decode(blob, shape=(3, 70))
    with pytest.raises(CorruptPayload):
        Codec.add_into(blob, torch.zeros(3, 70))


def harmless(blob: bytes) -> None:
    """Decoded to finite values, or refused as corrupt; nothing else, nothing big."""
    with allocating_at_most(4 * MAX_VALUES_PER_BYTE * len(blob) + (1 << 20)):
        survives(blob)


def survives(blob: bytes) -> None:
    """As ``harmless``, without a look at what is allocated."""
    for shape in ((3, 70), None):
        try:
            back = Codec.decode(blob, shape=shape)
        except CorruptPayload as error:
            assert "\n" not in str(error) and len(str(error)) < 400
        else:
            assert bool(torch.isfinite(back).all())
            assert shape is None or back.shape == shape
    try:
        Codec.inspect(blob)
        Codec.add_into(blob, torch.zeros(3, 70))
    except CorruptPayload:
        pass


def test_the_blobs_are_what_they_should_be() -> None:
    assert [Codec.inspect(blob).spec for blob in SMALL.values()] == [codec(s).spec for s in SPECS]


@pytest.mark.parametrize("spec", SPECS)
def test_every_changed_byte_is_refused_or_harmless(spec: str) -> None:
    blob = SMALL[spec]
    with allocating_at_most(4 * MAX_VALUES_PER_BYTE * len(blob) + (1 << 20)):
        for place in range(len(blob)):
            changed = bytearray(blob)
            changed[place] ^= (0xFF, 0x01, 0x80)[place % 3]
            with pytest.raises(CorruptPayload):
                Codec.decode(bytes(changed))
            if place >= 8:  # with a right checksum, the inner checks are reached
                survives(seal(bytes(changed[8:])))


@pytest.mark.parametrize("spec", SPECS)
def test_every_truncation_and_every_extension_is_refused(spec: str) -> None:
    blob = SMALL[spec]
    for cut in range(len(blob)):
        with pytest.raises(CorruptPayload):
            Codec.decode(blob[:cut])
    for tail in (b"\0", blob, b"\xff" * 9):
        refused(blob + tail)
        refused(tail + blob)


@pytest.mark.parametrize("spec", SPECS)
@given(data=st.data())
@settings(max_examples=25)
def test_any_flipped_bit_is_refused(spec: str, data: st.DataObject) -> None:
    blob = bytearray(SMALL[spec])
    bit = data.draw(st.integers(0, 8 * len(blob) - 1))
    blob[bit // 8] ^= 1 << bit % 8
    refused(bytes(blob))


@pytest.mark.parametrize("spec", SPECS)
@given(data=st.data())
@settings(max_examples=40)
def test_changed_bytes_under_a_right_checksum_are_harmless(spec: str, data: st.DataObject) -> None:
    rest = bytearray(SMALL[spec][8:])
    header = FIXED - 8 + len(spec) + 16
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, header - 1) | st.integers(0, len(rest) - 1))
        rest[place] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]) | st.integers(0, 255))
    harmless(seal(bytes(rest)))


@pytest.mark.parametrize("spec", SPECS)
def test_every_length_that_lies_under_a_right_checksum_is_refused(spec: str) -> None:
    payload = payload_of(SMALL[spec])
    for cut in range(len(payload)):
        refused(forge(spec, (3, 70), payload[:cut]))
    for more in (1, 4, 5000):
        refused(forge(spec, (3, 70), payload + bytes(more)))
    for shape in [(3, 700), (30, 70), (0, 70), (3,), (), (2**63, 2), (2**64 - 1, 2**64 - 1)]:
        with pytest.raises(CorruptPayload), allocating_at_most(1 << 20):
            Codec.decode(forge(spec, shape, payload))


@given(
    spec=st.sampled_from([s.encode() for s in SPECS])
    | st.sampled_from(
        [b"", b"fp33", b"*=fp32", b"topk", b"int8(block=0)", b"int8(block=9e9)", b"|"]
    )
    | st.binary(max_size=255),
    shape=st.lists(
        st.sampled_from([0, 1, 2, 3, 70, 4096, 2**31, 2**40, 2**63, 2**64 - 1]), max_size=18
    ),
    payload=st.binary(max_size=300) | st.integers(0, 2000).map(bytes),
    dtype=st.integers(0, 255) | st.integers(0, 3),
)
@settings(max_examples=200)
def test_forged_blobs_are_harmless(
    spec: bytes, shape: list[int], payload: bytes, dtype: int
) -> None:
    harmless(forge(spec, shape, payload, dtype))


@pytest.mark.parametrize("spec", SPECS)
@given(data=st.data())
@settings(max_examples=25)
def test_random_payloads_of_the_right_size_are_harmless(spec: str, data: st.DataObject) -> None:
    size = len(payload_of(SMALL[spec]))
    harmless(forge(spec, (3, 70), data.draw(st.binary(min_size=size, max_size=size))))


@given(blob=st.binary(max_size=60) | st.binary(max_size=60).map(seal))
def test_random_bytes_are_refused(blob: bytes) -> None:
    refused(blob)


@pytest.mark.parametrize(
    "shape", [(2**63, 0), (2**40, 0, 2**40), (0, 2**64 - 1), (0,) + (2**30,) * 9]
)
def test_an_empty_blob_of_an_impossible_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(CorruptPayload, match="more than any tensor has"):
        Codec.decode(forge("fp32", shape, b""))


def test_zeros_that_cost_nothing_are_paid_for() -> None:
    # 4096 values a byte at most: what a selection leaves out, what the filling stands for
    chosen = codec("topk(density=1e-9,chunk=16777216)|int8(block=1048576)")
    assert isinstance(chosen, Codec)
    count = 2**36
    assert chosen.payload_size(count) == count / 4096
    indices = np.arange(chosen.sparse.kept(count)) * 16777216  # type: ignore[union-attr]
    payload = chosen.sparse.pack(indices, count) + chosen.values.encode(  # type: ignore[union-attr]
        np.ones(indices.size, dtype=np.float32)
    )
    for spec in (chosen.spec, f"{chosen.spec}|zstd(level=3)"):
        for more in (0, 1, 5000):
            with pytest.raises(CorruptPayload), allocating_at_most(1 << 20):
                Codec.decode(forge(spec, (count,), payload + bytes(more)))
    small = codec("topk(density=1e-9,chunk=16777216)").encode(torch.ones(100_000))
    assert len(payload_of(small)) == 25
    assert int(Codec.decode(small).sum()) == 1
    filled = payload_of(small)
    for place in range(7, 25):
        changed = filled[:place] + b"\1" + filled[place + 1 :]
        with pytest.raises(CorruptPayload, match="bytes after its payload"):
            Codec.decode(forge(Codec.inspect(small).spec, (100_000,), changed))


@pytest.mark.parametrize(
    "spec",
    [
        "|".join(["bf16"] * 40), "|".join(["zstd"] * 100)[:255], "zstd(level=3)|fp32",
        "fp32|zstd(level=3)|zstd(level=3)", "topk(density=1,chunk=16)|topk(density=1,chunk=16)",
        "(" * 255, "fp32|" * 50, "zstd(level=99)", "sign(block=0)", "randk(density=2)",
        "randk(density=1e-3,seed=99999999999999999999)", "*=fp32", "fp32;bf16", "bf16 \n",
    ],
)  # fmt: skip
def test_chains_that_make_no_sense_are_refused(spec: str) -> None:
    refused(forge(spec, (3, 70), payload_of(SMALL["fp32"])))


def floats(*values: float, kind: str = "f") -> bytes:
    return struct.pack(f"<{len(values)}{kind}", *values)


@pytest.mark.parametrize(
    ("spec", "shape", "payload"),
    [
        ("fp32", (2,), floats(1, math.nan)),
        ("fp32", (2,), floats(-math.inf, 1)),
        ("bf16", (2,), b"\x80\x7f\x00\x00"),
        ("bf16", (1,), b"\xc0\xff"),
        ("fp16", (3,), floats(1) + floats(1, 2, math.inf, kind="e")),
        ("fp16", (3,), floats(math.nan) + floats(1, 2, 3, kind="e")),
        ("fp16", (3,), floats(math.inf) + floats(0, 2, 3, kind="e")),
        ("fp16", (3,), floats(3e38) + floats(9, 2, 3, kind="e")),
        ("int8(block=8)", (3,), floats(math.inf) + b"\0\1\2"),
        ("int8(block=8)", (3,), floats(math.nan) + b"\0\0\0"),
        ("int8(block=8)", (3,), floats(3e38) + b"\0\0\x7f"),
        ("int4(block=8)", (9,), floats(1, math.nan) + bytes(5)),
        ("int2(block=8)", (3,), b"\0\0\x80\x7f" + b"\x01"),
        ("int2(block=8)", (3,), b"\xc0\xff\0\0" + b"\0"),
        ("topk(density=0.5,chunk=16)|bf16", (4,), b"\x03\x80\x7f\0\0"),
        ("sign(block=8)", (9,), b"\x80\x7f\0\0" + bytes(2)),
        ("sign(block=8)", (9,), b"\0\0\xc0\xff" + bytes(2)),
        ("sign(block=8,scale=fp32)", (3,), floats(math.nan) + b"\x01"),
        ("randk(density=0.5,seed=0)|bf16", (4,), bytes(8) + b"\x80\x7f\0\0"),
    ],
)
def test_payloads_that_decode_to_no_number_are_refused(
    spec: str, shape: tuple[int, ...], payload: bytes
) -> None:
    blob = forge(spec, shape, payload)
    with pytest.raises(CorruptPayload, match="NaN or infinity"):
        Codec.decode(blob)
    with pytest.raises(CorruptPayload, match="NaN or infinity"):
        Codec.add_into(blob, torch.zeros(shape))


def test_another_version_of_the_format_is_refused() -> None:
    blob = SMALL["bf16"]
    with pytest.raises(CorruptPayload, match="of this version"):
        Codec.decode(MAGIC[:3] + b"\x02" + blob[4:])
