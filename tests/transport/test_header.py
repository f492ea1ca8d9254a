"""The header read here is the one that the codec wrote."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flower_geo.compression import Codec, codec
from flower_geo.transport.header import MAX_HEADER, check_header, describe

SPECS = [
    "fp32",
    "bf16",
    "int8(block=64)",
    "topk(density=0.1,chunk=512)|int8(block=64)|zstd(level=1)",
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (7,), (2, 3, 5), (1,) * 16, (4, 0, 2), (9000,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_it_says_what_the_codec_says(spec: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    blob = codec(spec).encode(torch.randn(shape).to(dtype))
    found, told = describe("x", len(blob), blob[:MAX_HEADER]), Codec.inspect(blob)
    assert found.shape == told.shape
    assert found.codec == told.spec
    assert f"torch.{found.dtype}" == str(told.dtype)
    assert found.total == told.nbytes
    assert check_header(found.message()) == found


@pytest.mark.parametrize("cut", range(30))
def test_a_blob_that_is_cut_is_plain_bytes(cut: int) -> None:
    blob = codec("fp32").encode(torch.zeros(3, 4))[:cut]
    header = describe("x", len(blob), blob)
    if cut < 4 + 4 + 3 + 4 + 16:
        assert (header.dtype, header.shape, header.codec) == ("bytes", (cut,), "")
    assert check_header(header.message()) == header


def test_the_transport_needs_no_torch() -> None:
    program = "import sys, flower_geo.transport; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "False"
