"""Random selections: the same on every machine, fair, and as wrong as theory says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.compression import Codec, ErrorFeedback, codec
from flower_geo.compression.randk import Drawn, RandK
from tests.compression.blobs import allocating_at_most, noise, payload_of


def places(chosen: RandK, salt: int, count: int) -> list[int]:
    return [int(i) for i in chosen.unpack(memoryview(salt.to_bytes(8, "little")), count)]


@given(
    density=st.floats(1e-6, 1.0),
    seed=st.integers(0, 2**63 - 1),
    salt=st.integers(0, 2**64 - 1),
    count=st.integers(0, 5000) | st.integers(60_000, 200_000),
)
def test_as_many_distinct_places_as_the_spec_says(
    density: float, seed: int, salt: int, count: int
) -> None:
    chosen = RandK(density, seed)
    found = chosen.unpack(memoryview(salt.to_bytes(8, "little")), count)
    assert found.dtype == np.int64 and found.size == chosen.kept(count)
    assert bool((np.diff(found) > 0).all())
    if count:
        assert found.size == min(count, max(1, round(density * count)))
        assert found[0] >= 0 and found[-1] < count


def test_the_places_are_frozen() -> None:
    assert places(RandK(0.2, 7), 12345, 40) == [1, 7, 9, 16, 22, 27, 30, 37]
    assert places(RandK(1e-12, 2**63 - 1), 2**64 - 1, 2**40) == [690737712976]


def test_every_place_is_as_likely_as_any_other() -> None:
    # 57 of 100: runs of one and of two values
    for density in (0.03, 0.57):
        chosen, draws = RandK(density, 3), 4000
        hits = np.zeros(100)
        for salt in range(draws):
            hits[places(chosen, salt, 100)] += 1
        share = chosen.kept(100) / 100
        spread = math.sqrt(draws * share * (1 - share))
        assert abs(hits - draws * share).max() < 5 * spread


def test_other_messages_seeds_and_lengths_keep_other_places() -> None:
    chosen = RandK(0.05, 0)
    sets = [places(chosen, 1, 2000), places(chosen, 2, 2000), places(RandK(0.05, 1), 1, 2000)]
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert len(set(sets[one]) & set(sets[other])) < 25
    codec_ = codec("randk(density=0.05)")
    first, second = (Codec.decode(codec_.encode(noise(2000, seed=s))) != 0 for s in (0, 1))
    assert int((first & second).sum()) < 25


def test_the_same_tensor_gives_the_same_bytes_and_no_indices_are_sent() -> None:
    chosen = codec("randk(density=0.1,seed=3)|bf16")
    tensor = noise(300, 100)
    blob = chosen.encode(tensor)
    assert chosen.encode(tensor.clone()) == blob == chosen.encode(tensor.T.contiguous().T)
    assert len(payload_of(blob)) == 8 + 2 * 3000
    back = Codec.decode(blob)
    kept = back != 0
    assert int(kept.sum()) == 3000
    assert torch.equal(back[kept], tensor[kept].to(torch.bfloat16).float())
    assert codec("randk(density=0.1,seed=4)|bf16").encode(tensor) != blob


def test_the_error_is_that_of_a_random_subset() -> None:
    # E|x - C(x)|^2 = (1 - k/n) |x|^2; one message is off by what its largest values weigh
    for density in (0.01, 0.1, 0.5):
        shares = []
        for seed in range(200):
            tensor = noise(5000, seed=seed)
            back = Codec.decode(codec(f"randk(density={density})").encode(tensor))
            assert bool(((back == 0) | (back == tensor)).all())
            shares.append(float((tensor - back).square().sum() / tensor.square().sum()))
        assert np.mean(shares) == pytest.approx(1 - density, abs=0.002)


def test_scaled_it_is_right_on_average() -> None:
    tensor = noise(1000)
    rounds = 1500
    total = torch.zeros(1000)
    for seed in range(rounds):
        Codec.add_into(codec(f"randk(density=0.25,seed={seed},scale=true)").encode(tensor), total)
    off = (total / rounds - tensor).abs() / tensor.abs()
    # of a mean of values x/p with probability p: spread sqrt((1-p)/p/rounds) of x
    assert float(off.max()) < 5 * math.sqrt(3 / rounds)
    once = Codec.decode(codec("randk(density=0.25,scale=true)").encode(tensor))
    assert torch.equal(once[once != 0], 4 * tensor[once != 0])


def test_with_feedback_everything_arrives() -> None:
    feedback, target = ErrorFeedback(), noise(3000)
    total, chosen = torch.zeros(3000), codec("randk(density=0.1)")
    for _ in range(80):
        Codec.add_into(feedback.encode("w", target, chosen), total)
        feedback.acknowledge()
    residual = feedback.residual("w")
    assert residual is not None
    assert torch.allclose(total + residual, 80 * target, atol=1e-3)
    # the place waited for longest: as long as a run of bad luck among 3000
    assert float((total / 80 - target).norm() / target.norm()) < 0.25


def test_memory_is_that_of_what_is_kept() -> None:
    chosen = codec("randk(density=0.001)|int8(block=256)")
    blob = chosen.encode(noise(1 << 22))
    out = torch.zeros(1 << 22)
    with allocating_at_most(4 << 20):
        Codec.add_into(blob, out)
    assert int((out != 0).sum()) > 4000
    assert isinstance(RandK(0.1), Drawn)
    with allocating_at_most(8 << 20):
        assert len(places(RandK(1e-6, 0), 5, 2**36)) == round(2**36 * 1e-6)
