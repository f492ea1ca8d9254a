"""Hidden states and gradients on the wire: codecs, changes of known samples, noise."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_geo.compression import Codec
from flower_geo.errors import CallFailed, CodecSpecError, ConfigError, CorruptPayload
from flower_geo.training.split import Wire
from flower_geo.training.split.references import References
from flower_geo.training.split.streams import Stream
from flower_geo.training.split.values import integers, integers_blob
from flower_geo.training.split.wire import Sent, WireEnd
from tests.training.split.halves import CONFIG, EXACT, batch_stream, pair

WIDTH = 8
DELTA = Wire(codec_activations="int4", codec_whole="bf16", delta_bytes=10_000)


def states(seed: int, rows: int = 2, length: int = 5) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def passed(
    one: WireEnd, other: WireEnd, hidden: Tensor, samples: list[int] | None, cut: Any = "lower"
) -> tuple[Sent, Tensor]:
    sent = one.send(cut, hidden, samples)
    return sent, other.receive(cut, sent.meta, sent.blobs, samples, WIDTH, 1000)


def size(sent: Sent) -> int:
    return sum(len(blob) for blob in sent.blobs.values())


# -- codecs -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lossless_states_arrive_in_their_dtype_to_the_bit(dtype: torch.dtype) -> None:
    hidden = states(0).to(dtype)
    _, found = passed(WireEnd(EXACT), WireEnd(EXACT), hidden, [4, 5])
    assert found.dtype == dtype and torch.equal(found, hidden)
    blobs = WireEnd(EXACT).send_gradient(hidden)
    assert torch.equal(WireEnd(EXACT).receive_gradient(blobs, hidden), hidden)


def test_each_direction_has_its_codec() -> None:
    wire = WireEnd(Wire(codec_activations="int8", codec_gradients="fp16"))
    sent = wire.send("lower", states(0), None)
    assert Codec.inspect(sent.blobs["activation"]).spec.startswith("int8")
    gradient = wire.send_gradient(states(1))
    assert Codec.inspect(gradient["gradient"]).spec == "fp16"
    with pytest.raises(CorruptPayload, match="shape"):
        wire.receive_gradient(gradient, states(1, rows=3))


def test_coarser_codecs_cost_fewer_bytes_and_still_train() -> None:
    ups, losses = [], []
    for wire in (EXACT, Wire(), Wire(codec_activations="int8", codec_gradients="int8")):
        both = pair("u-shape", CONFIG, wire, steps=8)
        batch = batch_stream()()
        losses.append(both.loop.run(partial(dict, batch), 8))
        ups.append(both.loop.traffic.up)
    assert ups[0] > 1.3 * ups[1] > 1.3 * ups[2]
    exact, half, quarter = losses
    assert exact.loss_last < exact.loss_first - 0.1
    assert half.loss_last == pytest.approx(exact.loss_last, rel=0.02)
    assert quarter.loss_last == pytest.approx(exact.loss_last, rel=0.1)
    assert len({found.loss_last for found in losses}) == 3


def test_settings_are_checked_and_told() -> None:
    wrong: list[Any] = [{"delta_bytes": -1}, {"activation_noise": float("nan")}]
    for values in wrong:
        with pytest.raises(ConfigError):
            Wire(**values)
    with pytest.raises(CodecSpecError):
        Wire(codec_gradients="int5000")
    terms = Wire(codec_activations=" int4 ").terms()
    assert terms["codec-activations"] == Wire(codec_activations="int4").terms()["codec-activations"]
    assert terms != Wire().terms() and all(type(value) is str for value in terms.values())


# -- changes of known samples ---------------------------------------------------


def test_what_a_receiver_knows_comes_nearer_at_each_visit() -> None:
    one, other = WireEnd(DELTA), WireEnd(DELTA)
    hidden = states(0)
    errors, bytes_sent = [], []
    for _ in range(5):
        sent, found = passed(one, other, hidden, [3, 9])
        errors.append(float((found - hidden).norm()))
        bytes_sent.append(size(sent))
    assert errors == sorted(errors, reverse=True) and errors[2] < 0.1 * errors[0]
    assert bytes_sent[1] < 0.7 * bytes_sent[0]
    plain, coarse = WireEnd(Wire(codec_activations="int4")), WireEnd(Wire())
    _, once = passed(plain, coarse, hidden, None)
    assert errors[4] < 0.1 * float((once - hidden).norm())


@settings(max_examples=40)
@given(
    visits=st.lists(
        st.tuples(
            st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(1, 6),
            st.booleans(), st.sampled_from(["lower", "upper"]),
        ),
        min_size=1, max_size=12,
    ),
    budget=st.sampled_from([1, 200, 500, 10_000]),
)  # fmt: skip
def test_both_ends_hold_the_same_bits_and_the_budget(visits: Any, budget: int) -> None:
    wire = Wire(codec_activations="int4", codec_whole="int8", delta_bytes=budget)
    one, other = WireEnd(wire), WireEnd(wire)
    for number, (samples, length, taken, cut) in enumerate(visits):
        hidden = states(number, len(samples), length)
        _, found = passed(one, other, hidden, samples, cut)
        assert found.shape == hidden.shape and bool(found.isfinite().all())
        for end in (one, other):
            (end.commit if taken else end.rollback)()
            assert all(refs.nbytes <= budget for refs in end.references.values())
            held = [t for k, t in end.state().items() if not k.endswith("mark")]
            assert sum(t.nbytes for t in held) == sum(
                refs.nbytes for refs in end.references.values()
            )
        ours, theirs = one.state(), other.state()
        assert one.mark == other.mark and ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_sample_without_room_is_sent_whole() -> None:
    wire = Wire(codec_activations="int4", delta_bytes=4 * 5 * WIDTH)
    one, other = WireEnd(wire), WireEnd(wire)
    for visit in range(3):
        sent, found = passed(one, other, states(0), [1, 2])
        assert sent.meta["delta"] == ([0] if visit else [])
        assert torch.equal(found[1], states(0)[1].bfloat16().float())
    # Grown beyond the budget it is known no more.
    sent, _ = passed(one, other, states(1, 1, 6), [1])
    assert sent.meta["delta"] == [0]
    sent, _ = passed(one, other, states(1, 1, 6), [1])
    assert sent.meta["delta"] == []


def test_a_step_that_is_not_taken_is_forgotten() -> None:
    one = WireEnd(DELTA)
    one.send("lower", states(0), [1, 2])
    one.commit()
    kept, mark = one.state(), one.mark
    one.send("lower", states(1), [2, 3])
    one.rollback()
    assert one.mark == mark
    assert all(torch.equal(one.state()[name], tensor) for name, tensor in kept.items())
    assert one.references["lower"].nbytes == 2 * 5 * WIDTH * 4


def test_ends_that_drifted_apart_are_found_out() -> None:
    one, other = WireEnd(DELTA), WireEnd(DELTA)
    passed(one, other, states(0), [1, 2])
    for end in (one, other):
        end.commit()
    other.forget()
    assert one.mark != other.mark
    sent = one.send("lower", states(1), [1, 2])
    with pytest.raises(CallFailed, match="remembered differently"):
        other.receive("lower", sent.meta, sent.blobs, [1, 2], WIDTH, 1000)
    sent = WireEnd(DELTA).send("lower", states(1), [1, 2])
    for samples in ([1], [1, 2, 3]):
        with pytest.raises(CallFailed, match="samples"):
            other.receive("lower", sent.meta, sent.blobs, samples, WIDTH, 1000)
    with pytest.raises(CallFailed, match="shape"):
        other.receive("lower", sent.meta, sent.blobs, [1, 2], WIDTH, 9)


def test_a_change_that_hides_among_whole_rows_is_refused() -> None:
    one, other = WireEnd(DELTA), WireEnd(DELTA)
    passed(one, other, states(0), [1, 2])
    sent = one.send("lower", states(1, 3), [1, 2, 3])
    swapped = {
        "activation": sent.blobs["activation-delta"], "activation-delta": sent.blobs["activation"],
    }  # fmt: skip
    with pytest.raises(CallFailed, match="shape"):
        other.receive("lower", sent.meta, swapped, [1, 2, 3], WIDTH, 1000)
    alone = {"activation": one.send("lower", states(1, 3), [7, 8, 9]).blobs["activation"]}
    with pytest.raises(CallFailed, match=r"not \[1, length"):
        other.receive("lower", sent.meta, alone, [1, 2, 3], WIDTH, 1000)


def test_training_with_changes_of_known_samples_sends_less() -> None:
    ups = []
    for delta in (0, 100_000):
        wire = Wire(codec_activations="bf16" if not delta else "int4", delta_bytes=delta)
        both = pair("vanilla", CONFIG, wire, steps=12)
        result = both.loop.run(batch_stream(samples=6), 12)
        ups.append((both.loop.traffic.up, result.loss_last))
    assert ups[1][0] < 0.8 * ups[0][0]
    assert ups[1][1] == pytest.approx(ups[0][1], rel=0.05)


def test_references_survive_only_as_they_were_committed() -> None:
    references = References(1000)
    references.put(1, torch.ones(2, 4))
    assert references.state().keys() == {"mark"} and references.nbytes == 32
    references.commit()
    again = References(1000)
    again.load(references.state())
    found = again.get(1, 3, 4)
    assert found is not None and torch.equal(found, torch.tensor([[1.0] * 4, [1.0] * 4, [0.0] * 4]))
    assert again.nbytes == 32 and again.get(1, 3, 5) is None and again.get(2, 3, 4) is None


# -- noise and streams ----------------------------------------------------------


def test_noise_is_relative_seeded_and_goes_on() -> None:
    wire = Wire(activation_noise=0.5)
    hidden = torch.cat([states(0, 50, 40), 100 * states(1, 50, 40)]).requires_grad_(True)
    end = WireEnd(wire, seed=4)
    noisy = end.noisy(hidden)
    assert not noisy.requires_grad
    rms = hidden.detach().square().mean(-1, keepdim=True).sqrt()
    spread = ((noisy - hidden.detach()) / rms).std()
    assert float(spread) == pytest.approx(0.5, rel=0.02)
    assert torch.equal(WireEnd(wire, seed=4).noisy(hidden), noisy)
    assert not torch.equal(WireEnd(wire, seed=5).noisy(hidden), noisy)
    state = end.state()
    second = end.noisy(hidden)
    other = WireEnd(wire, seed=9)
    other.load(state)
    assert torch.equal(other.noisy(hidden), second) and not torch.equal(second, noisy)
    assert torch.equal(WireEnd(EXACT).noisy(hidden), hidden)


def test_noise_reaches_the_cloud_only() -> None:
    losses = []
    for noise in (0.0, 0.3):
        wire = Wire(codec_activations="fp32", codec_gradients="fp32", activation_noise=noise)
        losses.append(pair("vanilla", wire=wire).loop.run(batch_stream(), 2).loss_first)
    assert losses[0] != losses[1]


def test_a_stream_stands_apart_from_torchs() -> None:
    torch.manual_seed(3)
    stream = Stream(torch.device("cpu"))
    before = torch.get_rng_state()
    with stream.active():
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(4), first)
    state, number = stream.state(), stream.number()
    with stream.active():
        second = torch.rand(4)
    other = Stream(torch.device("cpu"), 8)
    other.load(state)
    with other.active():
        assert torch.equal(torch.rand(4), second)
    assert not torch.equal(first, second) and number != stream.number()


# -- whole numbers --------------------------------------------------------------


def test_whole_numbers_arrive_or_are_refused() -> None:
    values = torch.tensor([[0, 151_000, -100], [5, 16_777_215, 3]])
    blobs = {"labels": integers_blob(values, "labels")}
    found = integers(blobs, "labels", [(2, 3)], 0, 2**24, -100)
    assert found.dtype == torch.long and torch.equal(found, values)
    for shapes, high in (([(3, 2)], 2**24), ([(2, 3)], 10)):
        with pytest.raises(CallFailed):
            integers(blobs, "labels", shapes, 0, high, -100)
    with pytest.raises(CallFailed, match="labels"):
        integers(blobs, "labels", [(2, 3)], 0, 2**24)
    with pytest.raises(CallFailed, match="16777216"):
        integers_blob(torch.tensor([2**24]), "ids")
