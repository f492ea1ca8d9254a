"""zstd over byte planes: exact, small where there is something to find, safe against bombs."""

from __future__ import annotations

import resource
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
import zstandard

from flower_geo.compression import Codec, codec
from flower_geo.compression.lossless import Zstd, sections_of
from flower_geo.errors import CorruptPayload
from tests.compression.blobs import allocating_at_most, forge, noise, payload_of

PLANE = 1 << 18


def packed(*frames: bytes) -> bytes:
    """A payload of frames, as the packer writes it."""
    return struct.pack(f"<{len(frames)}I", *map(len, frames)) + b"".join(frames)


def frame(data: bytes, size: bool = True, checksum: bool = False) -> bytes:
    machine = zstandard.ZstdCompressor(level=3, write_content_size=size, write_checksum=checksum)
    return machine.compress(data)


@pytest.mark.parametrize(
    "plain",
    [
        "fp32", "bf16", "fp16", "int8(block=256)", "int8(block=9)", "int4(block=64)",
        "int2(block=64)", "sign(block=8)", "sign(block=8,scale=fp32)",
        "topk(density=0.3,chunk=64)|bf16", "randk(density=0.5,seed=0)|fp16",
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [300, 4097, 2 * PLANE + 3])
def test_packing_changes_no_bit_of_what_is_decoded(plain: str, size: int) -> None:
    tensor = torch.where(noise(size) > 1, noise(size, seed=1), 0.0)
    blob = codec(f"{plain}|zstd").encode(tensor)
    back = Codec.decode(codec(plain).encode(tensor))
    assert torch.equal(Codec.decode(blob).view(torch.int32), back.view(torch.int32))
    assert codec(f"{plain}|zstd").encode(tensor) == blob
    if size > 4000 and "randk" not in plain and "sign" not in plain:
        assert Codec.inspect(blob).spec == f"{plain}|zstd(level=3)"
    out = torch.zeros(size)
    Codec.add_into(blob, out, 2.0)
    assert torch.equal(out, 2 * back)


def test_fp32_is_lossless_to_the_bit() -> None:
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 3.4028235e38, 1.0]).repeat(1000)
    blob = codec("zstd").encode(odd)
    assert Codec.inspect(blob).spec == "fp32|zstd(level=3)" and len(blob) < odd.numel() / 10
    assert torch.equal(Codec.decode(blob).view(torch.int32), odd.view(torch.int32))


def test_exponents_are_found_in_weights_of_any_size() -> None:
    # Of a normal weight's 32 bits about 5 can be saved; without planes zstd finds no more than 2.
    for size in (2048, 16384, 300_000):
        weights = noise(size, scale=0.02)
        blob = codec("fp32|zstd").encode(weights)
        plain = zstandard.ZstdCompressor(level=3).compress(weights.numpy().tobytes())
        assert len(blob) < 0.9 * 4 * size and len(blob) < 0.97 * len(plain)
        assert len(codec("bf16|zstd").encode(weights)) < 0.78 * 2 * size


def test_the_layout_is_frozen() -> None:
    tensor = torch.full((1000,), 1.5)
    payload = payload_of(codec("fp32|zstd").encode(tensor))
    lengths = struct.unpack("<4I", payload[:16])
    start, planes = 16, []
    for length in lengths:
        planes.append(zstandard.decompress(payload[start : start + length]))
        start += length
    assert start == len(payload)
    assert planes == [bytes(1000), bytes(1000), b"\xc0" * 1000, b"\x3f" * 1000]
    assert [sections_of(codec(s).values, 300) for s in ("fp32", "bf16", "fp16")] == [  # type: ignore[union-attr]
        [(1200, 4)], [(600, 2)], [(4, 4), (600, 2)],
    ]  # fmt: skip
    for spec, sections in {
        "int8(block=256)": [(8, 4), (300, 1)],
        "int4(block=64)": [(20, 4), (150, 1)],
        "int2(block=64)": [(20, 4), (75, 1)],
        "sign(block=64)": [(10, 2), (38, 1)],
        "sign(block=64,scale=fp32)": [(20, 4), (38, 1)],
    }.items():
        assert sections_of(codec(spec).values, 300) == sections  # type: ignore[union-attr]


def test_a_plane_of_noise_is_stored_and_its_neighbours_are_not() -> None:
    bits = torch.randint(0, 2**16, (50_000,), dtype=torch.int32) | 0x3F800000
    blob = codec("zstd").encode(bits.view(torch.float32))
    lengths = struct.unpack("<4I", payload_of(blob)[:16])
    assert lengths[:2] == (50_000, 50_000) and max(lengths[2:]) < 50
    assert torch.equal(Codec.decode(blob).view(torch.int32), bits)


def test_levels() -> None:
    tensor = noise(100, 1000).round()
    sizes = [len(codec(f"int8|zstd(level={level})").encode(tensor)) for level in (1, 19)]
    assert sizes[1] < sizes[0]


RIGHT = [frame(b"a" * 100), frame(b"b" * 100), frame(b"\x80" * 100), frame(b"\x3f" * 100)]


def test_a_payload_put_together_by_hand_is_read() -> None:
    whole = Codec.decode(forge("fp32|zstd(level=3)", (100,), packed(*RIGHT)))
    assert whole.tolist() == [struct.unpack("<f", b"ab\x80\x3f")[0]] * 100


def with_window(size: int, log: int) -> bytes:
    """A frame that asks for a window of ``2**log`` bytes."""
    options = zstandard.ZstdCompressionParameters(
        window_log=log, write_content_size=False, format=zstandard.FORMAT_ZSTD1
    )
    machine = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return machine.compress(b"b" * size) + machine.flush()


def declaring(size: int) -> bytes:
    """A frame that says it holds ``size`` bytes: magic, descriptor, size, one empty last block."""
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, size) + b"\x01\0\0"


DICTIONARY = zstandard.ZstdCompressionDict(
    bytes(range(256)) * 8, dict_type=zstandard.DICT_TYPE_RAWCONTENT
)

BAD_FRAMES = {
    "empty": b"",
    "cut": RIGHT[1][:-1],
    "noise": b"\xff" * 20,
    "trailing": RIGHT[1] + b"\0",
    "two frames": frame(b"b" * 50) + frame(b"b" * 50),
    "right one twice": RIGHT[1] + RIGHT[1],
    "skippable": struct.pack("<II", 0x184D2A50, 4) + b"abcd",
    "skippable first": struct.pack("<II", 0x184D2A50, 0) + RIGHT[1],
    "one less": frame(b"b" * 99),
    "one more": frame(b"b" * 101),
    "bomb, declared": frame(bytes(1 << 28)),
    "bomb, undeclared": frame(bytes(1 << 20), size=False),
    "bomb, declared as fits": declaring(100) + bytes(30),
    "declares 2**63": declaring(2**63),
    "declares 2**64 - 1": declaring(2**64 - 1),
    "declares nothing": frame(b"b" * 100, size=False),
    "window of 8 MiB": with_window(100, 23),
    "window of 2 GiB": struct.pack("<IBBB", 0xFD2FB528, 0x80, 0xA8, 100) + b"\0\0\0\x01\0\0",
    "wrong checksum": frame(b"b" * 100, checksum=True)[:-1] + b"\0",
    "longer than its plane": b"b" * 101,
    "dictionary": zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(b"b" * 100),
    "dictionary id": struct.pack("<IBBB", 0xFD2FB528, 0x21, 7, 100) + b"\x23\x03\0b",
}


@pytest.mark.parametrize("name", BAD_FRAMES)
def test_a_bad_frame_is_refused_and_allocates_nothing(name: str) -> None:
    bad = BAD_FRAMES[name]
    if name == "dictionary":  # of a raw one no id is kept; what it refers to is not there
        bad = zstandard.ZstdCompressor(dict_data=DICTIONARY).compress(bytes(range(100)))
        assert len(bad) < 60
    blob = forge("fp32|zstd(level=3)", (100,), packed(RIGHT[0], bad, *RIGHT[2:]))
    for shape in (None, (100,)):
        with pytest.raises(CorruptPayload) as caught, allocating_at_most(len(blob) + (1 << 16)):
            Codec.decode(blob, shape=shape)
        assert "\n" not in str(caught.value)


def test_lengths_that_do_not_fit_are_refused() -> None:
    body = b"".join(RIGHT)
    right = [len(each) for each in RIGHT]
    for lengths in (
        [0, *right[1:]], [right[0] + 1, *right[1:]], [2**32 - 1] * 4, [0, 0, 0, len(body)],
        [*right[:3], right[3] - 1], [*right[:3], 2**31],
    ):  # fmt: skip
        blob = forge("fp32|zstd(level=3)", (100,), struct.pack("<4I", *lengths) + body)
        with pytest.raises(CorruptPayload), allocating_at_most(1 << 16):
            Codec.decode(blob)
    for tail in (b"\0", b"\0" * 300, RIGHT[0]):
        with pytest.raises(CorruptPayload):
            Codec.decode(forge("fp32|zstd(level=3)", (100,), packed(*RIGHT) + tail))


def test_a_payload_longer_than_without_packing_is_refused() -> None:
    stored = packed(*[bytes(100)] * 4)
    assert len(stored) > 400
    with pytest.raises(CorruptPayload, match="bytes of payload"):
        Codec.decode(forge("fp32|zstd(level=3)", (100,), stored))


@pytest.mark.parametrize("spec", ["fp32|zstd(level=3)", "int4(block=64)|zstd(level=3)"])
def test_claims_without_the_bytes_for_them_are_refused_at_once(spec: str) -> None:
    for count in (2**27, 2**36, 2**40):
        for payload in (packed(*RIGHT), bytes(2000)):
            with pytest.raises(CorruptPayload, match="of payload"), allocating_at_most(1 << 16):
                Codec.decode(forge(spec, (count,), payload), shape=(count,))


def bomb(count: int, spec: str) -> bytes:
    """The smallest blob that claims ``count`` values: runs of zeros."""
    blob = codec(spec).encode(torch.zeros(count))
    assert len(blob) < count / 700
    return blob


@pytest.mark.parametrize("spec", ["fp32|zstd", "bf16|zstd", "int8|zstd", "int4|zstd", "sign|zstd"])
def test_a_bomb_takes_at_most_twice_its_checked_size(spec: str) -> None:
    count = 1 << 22
    blob = bomb(count, spec)
    for shape in (None, (count,)):
        with allocating_at_most(2 * 4 * count + (8 << 20)):
            Codec.decode(blob, shape=shape)
    out = torch.zeros(count)
    with allocating_at_most(4 * count + (8 << 20)):  # besides ``out``
        Codec.add_into(blob, out)
    with pytest.raises(CorruptPayload), allocating_at_most(1 << 16):
        Codec.decode(blob, shape=(100,))


def test_resident_memory_of_a_bomb_is_bounded(tmp_path) -> None:
    # tracemalloc sees neither torch nor zstd
    count = 1 << 24
    path = tmp_path / "bomb"
    path.write_bytes(bomb(count, "fp32|zstd(level=19)"))
    program = (
        "import resource, sys, pathlib\n"
        "from flower_geo.compression import Codec, codec\n"
        "import torch\n"
        "blob = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "Codec.decode(codec('fp32|zstd').encode(torch.zeros(1000)))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "Codec.decode(blob)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    grown = int(done.stdout) * (1 if sys.platform == "darwin" else 1024)
    assert grown < 2 * 4 * count + (24 << 20), resource.RUSAGE_SELF


def test_the_packer_alone_checks_what_it_is_given() -> None:
    packer = Zstd(3)
    sections = [(7, 1), (4 * PLANE + 8, 4), (0, 2), (PLANE + 1, 1)]
    payload = np.arange(7 + 5 * PLANE + 9, dtype=np.uint64).astype(np.uint8)
    data = b"".join(packer.pack(payload.data, sections))
    assert len(data) > packer.fewest(sections) == 5 * (1 + 8 + 2)
    back, used = packer.unpack(memoryview(data + b"rest"), sections)
    assert bytes(back) == payload.tobytes() and used == len(data)
    for cut in range(0, len(data), 97):
        with pytest.raises(CorruptPayload):
            packer.unpack(memoryview(data[:cut]), sections)
    assert packer.unpack(memoryview(b""), [(0, 4)]) == (memoryview(b""), 0)
