"""Odd blobs for tests/compression/fuzz: ``python -m tests.compression.odd_blobs`` adds new ones.

A blob that is there already is never written again: those that decode pin the
format, those that are refused once got further than they should, or might.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
import zstandard

from flower_geo.compression import Codec, codec
from flower_geo.errors import CorruptPayload
from tests.compression.blobs import FIXED, MAGIC, SPECS, forge, noise, payload_of, seal

FOLDER = Path(__file__).parent / "fuzz"
INDEX = FOLDER / "index.json"
ZSTD = "fp32|zstd(level=3)"


def outcome(blob: bytes) -> str:
    """Hash of what a blob decodes to, or why it is refused."""
    try:
        tensor = Codec.decode(blob)
    except CorruptPayload as error:
        return f"refused: {error}"
    digest = hashlib.sha256(f"{list(tensor.shape)}".encode())
    digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def frame(data: bytes, size: bool = True) -> bytes:
    return zstandard.ZstdCompressor(level=3, write_content_size=size).compress(data)


def packed(*frames: bytes) -> bytes:
    return struct.pack(f"<{len(frames)}I", *map(len, frames)) + b"".join(frames)


def _sound() -> Iterator[tuple[str, bytes]]:
    for number, spec in enumerate(SPECS):
        yield f"codec-{number:02}", codec(spec).encode(noise(3, 10).repeat(1, 7))
    yield "scalar", codec("zstd").encode(torch.tensor(-2.5))
    yield "empty", codec("int8|zstd").encode(torch.zeros(2, 0, 3))
    yield "16-dimensions", codec("bf16").encode(noise(*[1] * 12, 2, 3, 4, 5))
    yield "filled", codec("topk(density=1e-9,chunk=16777216)").encode(torch.ones(100_000))
    yield "zeros", codec("int4|zstd").encode(torch.zeros(1000, 1000))
    yield "extremes", codec("fp16|zstd").encode(torch.tensor([3e38, -1e-45, -0.0] * 100))
    yield "double", codec("int2").encode(noise(300).double())
    yield "two-planes", codec("bf16|zstd").encode(torch.arange(600_000.0) // 999)


def _headers() -> Iterator[tuple[str, bytes]]:
    whole = codec("bf16").encode(noise(30))
    yield "nothing", b""
    yield "magic-only", MAGIC
    yield "cut-header", whole[: FIXED - 1]
    yield "next-version", MAGIC[:3] + b"\x02" + whole[4:]
    yield "wrong-crc", whole[:4] + b"\0\0\0\0" + whole[8:]
    yield "crc-of-all", MAGIC + struct.pack("<I", 0xFFFFFFFF) + whole[8:]
    yield "dtype-4", forge("bf16", (30,), payload_of(whole), dtype=4)
    yield "17-dimensions", forge("fp32", (1,) * 17, bytes(4))
    yield "255-dimensions", seal(b"\0\xff\x04fp32" + bytes(40))
    yield "2-to-the-63", forge("fp32", (2**63,), bytes(40))
    yield "minus-one", forge("fp32", (2**64 - 1,), bytes(40))
    yield "minus-one-by-minus-one", forge("fp32", (2**64 - 1, 2**64 - 1), bytes(4))
    yield "overflows-to-zero", forge("fp32", (2**32, 2**32), b"")
    yield "empty-and-huge", forge("fp32", (0, 2**63), b"")
    yield "no-codec", forge("", (30,), payload_of(whole))
    yield "unknown-codec", forge("int9(block=64)", (30,), bytes(34))
    yield "codec-not-ascii", forge(b"fp\xb332", (10,), bytes(40))
    yield "rules", forge("*=fp32", (10,), bytes(40))
    yield "100-stages", forge("|".join(["zstd"] * 51), (10,), bytes(40))
    yield "40-stages", forge("|".join(["bf16"] * 40), (10,), bytes(20))
    yield "wrong-order", forge("zstd(level=3)|fp32", (10,), bytes(40))
    yield "open-parenthesis", forge("int8(" * 40, (10,), bytes(40))
    yield "huge-number", forge("int8(block=" + "9" * 180 + ")", (10,), bytes(14))
    yield "spec-longer-than-blob", seal(b"\0\x01\xfffp32" + bytes(20))
    yield "tail", seal(whole[8:] + b"\0")


def _payloads() -> Iterator[tuple[str, bytes]]:
    yield "nan", forge("fp32", (3,), struct.pack("<3f", 0, math.nan, 0))
    yield "nan-scale", forge("int8(block=8)", (3,), struct.pack("<f3b", math.nan, 0, 1, 2))
    yield "inf-scale", forge("int4(block=8)", (3,), struct.pack("<f2B", math.inf, 0x17, 7))
    yield "overflow", forge("fp16", (3,), struct.pack("<f3e", 3e38, 2, 0, 1))
    yield "sign-nan", forge("sign(block=8)", (8,), b"\xc0\x7f\xff")
    yield "sign-minus", forge("sign(block=8)", (8,), b"\x80\xbf\x0f")
    yield "randk-nan", forge("randk(density=0.5,seed=0)|bf16", (2,), bytes(8) + b"\xc0\x7f")
    yield "randk-no-salt", forge("randk(density=0.5,seed=0)|bf16", (2,), bytes(2))
    topk = "topk(density=0.125,chunk=16)|bf16"
    for name, indices in {"ascending": 0x31, "twice": 0x33, "falling": 0x13}.items():
        yield f"topk-{name}", forge(topk, (16,), bytes([indices]) + b"\x80\x3f" * 2)
    yield "topk-out-of-range", forge(topk, (19,), b"\x31\x0f" + b"\x80\x3f" * 3)
    bitmap = "topk(density=0.5,chunk=16)|bf16"
    for name, marks in {"8-marks": b"\xff\0", "9-marks": b"\xff\1", "7-marks": b"\x7f\0"}.items():
        yield f"bitmap-{name}", forge(bitmap, (16,), marks + b"\x80\x3f" * 8)
    yield "more-kept-than-there-are", forge("topk(density=2,chunk=16)|bf16", (4,), bytes(9))


def _frames() -> Iterator[tuple[str, bytes]]:
    right = [frame(bytes([value]) * 100) for value in (0, 0, 0x80, 0x3F)]
    yield "zstd-ones", forge(ZSTD, (100,), packed(*right))
    bad = {
        "bomb": frame(bytes(1 << 20)),
        "bomb-undeclared": frame(bytes(1 << 20), size=False),
        "liar": struct.pack("<IBQ", 0xFD2FB528, 0xE0, 100) + b"\x01\0\0",
        "2-to-the-63": struct.pack("<IBQ", 0xFD2FB528, 0xE0, 2**63) + b"\x01\0\0",
        "size-missing": frame(bytes(100), size=False),
        "window": struct.pack("<IBBB", 0xFD2FB528, 0x80, 0xA8, 100) + b"\0\0\0\x01\0\0",
        "dictionary": struct.pack("<IBBB", 0xFD2FB528, 0x21, 7, 100) + b"\x23\x03\0b",
        "skippable": struct.pack("<II", 0x184D2A50, 4) + b"abcd",
        "twice": right[0] * 2,
        "cut": right[0][:-1],
        "none": b"",
        "noise": bytes(range(90)),
    }
    for name, each in bad.items():
        yield f"zstd-{name}", forge(ZSTD, (100,), packed(each, *right[1:]))
    yield "zstd-tail", forge(ZSTD, (100,), packed(*right) + b"\0")
    yield "zstd-lengths", forge(ZSTD, (100,), b"\xff" * 16 + b"".join(right))
    yield "zstd-stored", forge(ZSTD, (100,), packed(*[bytes(100)] * 4))
    yield "zstd-huge-claim", forge(ZSTD, (2**40,), packed(*right))
    yield "zstd-filling", forge(ZSTD, (100_000,), packed(*right) + bytes(9))
    yield "zstd-nan", forge(ZSTD, (100,), packed(*right[:2], *[frame(b"\xff" * 100)] * 2))
    spec = "topk(density=1.0,chunk=262144)|fp32|zstd(level=3)"
    wide = [frame(bytes(1 << 18))] * 4
    yield "zstd-no-indices", forge(spec, (1 << 18,), packed(frame(bytes(1 << 15)), *wide))
    yield "zstd-all-indices", forge(spec, (1 << 18,), packed(frame(b"\xff" * (1 << 15)), *wide))


def odd_blobs() -> dict[str, bytes]:
    """All of them by name."""
    parts = (_sound(), _headers(), _payloads(), _frames())
    return {name: blob for part in parts for name, blob in part}


def main() -> None:
    """Write those that are new."""
    FOLDER.mkdir(exist_ok=True)
    known = json.loads(INDEX.read_text(encoding="utf-8")) if INDEX.exists() else {}
    for name, blob in odd_blobs().items():
        if name not in known:
            (FOLDER / f"{name}.blob").write_bytes(blob)
            known[name] = outcome(blob)
    text = json.dumps(dict(sorted(known.items())), indent=1) + "\n"
    INDEX.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
