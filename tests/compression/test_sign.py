"""Scaled signs: the error of theory, and what a mean cannot hold."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flower_geo.compression import Codec, ErrorFeedback, codec
from tests.compression.blobs import noise, payload_of


@pytest.mark.parametrize("size", [1000, 4096, 5003, 300_000])
@pytest.mark.parametrize(("scale", "close"), [("fp32", 1e-6), ("bf16", 2**-8)])
@pytest.mark.parametrize("block", [8, 9, 64, 1000, 1 << 20])
def test_the_error_of_each_block_is_that_of_theory(
    block: int, scale: str, close: float, size: int
) -> None:
    tensor = noise(size) * noise(size, seed=3).exp()
    back = Codec.decode(codec(f"sign(block={block},scale={scale})").encode(tensor))
    for start in range(0, size, block):
        x, y = tensor[start : start + block].double(), back[start : start + block].double()
        mean = x.abs().mean()
        kept = y.abs().max()
        assert abs(float(kept / mean) - 1) <= close and bool((y.abs() == kept).all())
        assert bool((x.sign() * y.sign() >= 0).all())
        theory = float((x**2).sum() - x.abs().sum() ** 2 / x.numel())
        rounding = x.numel() * float(kept - mean) ** 2
        assert float(((x - y) ** 2).sum()) == pytest.approx(theory + rounding, rel=1e-9)
        if start > 40 * block:
            break


def test_the_layout_is_frozen() -> None:
    values = [1.0, -1, 2, -2, 0, 0, -0.0, -2, -16, 8, -8, 16] + [0.0] * 4 + [-3.0]
    blob = codec("sign(block=8)").encode(torch.tensor(values + [0.0] * 3))
    # means 1, 6 and 0.75; bits 1, 3 and 7, then 8 and 10, then 16
    assert payload_of(blob).hex() == "803f" + "c040" + "403f" + "8a0501"
    assert Codec.decode(blob)[8:12].tolist() == [-6, 6, -6, 6]


def test_blocks_of_zeros_decode_to_zeros() -> None:
    tensor = noise(4096)
    tensor[64:128], tensor[4032:] = 0.0, -0.0
    back = Codec.decode(codec("sign(block=64)").encode(tensor))
    zero = (back == 0).nonzero().view(-1).tolist()
    assert zero == [*range(64, 128), *range(4032, 4096)]
    assert not bool(torch.signbit(back[zero]).any())


def test_means_stay_within_fp32() -> None:
    largest = torch.finfo(torch.float32).max
    for scale in ("bf16", "fp32"):
        chosen = codec(f"sign(block=64,scale={scale})")
        huge = Codec.decode(chosen.encode(torch.full((1000,), -largest)))
        assert bool((huge <= -0.99 * largest).all()) and bool(torch.isfinite(huge).all())
        tiny = Codec.decode(chosen.encode(torch.full((1000,), -1e-45)))
        assert bool((tiny <= 0).all()) and float(tiny.abs().max()) < 1e-40


def test_one_bit_a_value_and_one_mean_a_block() -> None:
    blob = codec("sign(block=256)").encode(noise(1 << 20))
    assert 8 * len(blob) / (1 << 20) == pytest.approx(1 + 16 / 256, abs=0.001)


@pytest.mark.parametrize("block", [8, 13, 256])
def test_what_was_decoded_encodes_to_the_same_bytes(block: int) -> None:
    tensor = noise(5003)
    tensor[100:200] = 0
    for scale in ("bf16", "fp32"):
        chosen = codec(f"sign(block={block},scale={scale})")
        blob = chosen.encode(tensor)
        assert chosen.encode(Codec.decode(blob)) == blob


def test_with_feedback_everything_arrives() -> None:
    feedback, target = ErrorFeedback(), noise(2000)
    total = torch.zeros(2000)
    for _ in range(60):
        Codec.add_into(feedback.encode("w", target, codec("sign(block=64)")), total)
        feedback.acknowledge()
    residual = feedback.residual("w")
    assert residual is not None
    assert torch.allclose(total + residual, 60 * target, atol=1e-3)
    assert float((total / 60 - target).norm() / target.norm()) < 0.15


def test_pieces_cover_all_values_in_order() -> None:
    chosen = codec("sign(block=9)")
    values = noise(600_000).numpy()
    pieces = list(chosen.values.pieces(memoryview(chosen.values.encode(values)), values.size))  # type: ignore[union-attr]
    assert [start for start, _ in pieces] == list(
        np.cumsum([0, *(part.size for _, part in pieces)])[:-1]
    )
    assert len(pieces) > 2 and sum(part.size for _, part in pieces) == values.size
