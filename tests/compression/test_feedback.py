"""Error feedback: nothing given is lost, whatever happens to the messages."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from flower_geo.compression import Codec, ErrorFeedback, codec, pack, unpack
from flower_geo.errors import CheckpointCorrupt, CodecError, NonFiniteTensor
from tests.compression.blobs import noise

LOSSY = [
    "bf16",
    "int8(block=256)",
    "int4(block=64)",
    "int2(block=64)",
    "topk(density=0.0156,chunk=4096)",
    "topk(density=0.0156,chunk=4096)|int2(block=64)",
    "topk(density=0.25,chunk=64)|int4(block=64)",
]


def given_at(round_: int, size: int = 5000) -> Tensor:
    return noise(size, seed=round_, scale=1e-3)


@pytest.mark.parametrize("spec", LOSSY)
def test_sent_and_residual_is_given_over_losses_and_rollbacks(spec: str) -> None:
    """A lost update is given again, merged into the next one, as a site does it."""
    chosen, feedback = codec(spec), ErrorFeedback()
    fate = torch.rand(50, generator=torch.Generator().manual_seed(1))
    sent = torch.zeros(5000, dtype=torch.float64)
    total = torch.zeros(5000, dtype=torch.float64)
    residual: Tensor | None = None
    for round_ in range(50):
        delta = given_at(round_)
        back = Codec.decode(feedback.encode("w", delta, chosen))
        if fate[round_] < 0.3:  # lost, refused or late: this update does not count
            feedback.rollback()
            continue
        if fate[round_] < 0.5:  # asked again before the acknowledgement: the same bytes
            back = Codec.decode(feedback.encode("w", delta, chosen))
        feedback.acknowledge()
        sent += back
        total += delta
        residual = feedback.residual("w")
        assert residual is not None
        assert float((sent + residual - total).abs().max()) < 1e-7 * (round_ + 2)
    assert int((fate < 0.3).sum()) > 5
    # and the residual does not run away: the codec sends what is large
    assert residual is not None
    assert float(residual.norm()) < 60 * float(given_at(0).norm())


@pytest.mark.parametrize("spec", LOSSY)
def test_decay_follows_its_recursion(spec: str) -> None:
    chosen, feedback = codec(spec), ErrorFeedback(decay=0.95)
    residual = torch.zeros(5000, dtype=torch.float64)
    for round_ in range(50):
        delta = given_at(round_)
        back = Codec.decode(feedback.encode("w", delta, chosen))
        feedback.acknowledge()
        residual = 0.95 * residual + delta.double() - back.double()
        found = feedback.residual("w")
        assert found is not None
        assert torch.allclose(found.double(), residual, rtol=0, atol=1e-7)


@given(
    fates=st.lists(st.sampled_from(["ack", "lose", "again", "save"]), max_size=12), data=st.data()
)
@settings(max_examples=40)
def test_any_pattern_of_fates_keeps_the_sum(fates: list[str], data: st.DataObject) -> None:
    chosen = codec(data.draw(st.sampled_from(LOSSY)))
    feedback = ErrorFeedback()
    sent, total = torch.zeros(300), torch.zeros(300)
    for round_, fate in enumerate(fates):
        delta = given_at(round_, 300)
        blob = feedback.encode("w", delta, chosen)
        if fate == "lose":
            feedback.rollback()
            continue
        if fate == "again":
            assert feedback.encode("w", delta, chosen) == blob
        if fate == "save":  # restarted from disk after the acknowledgement
            reborn = ErrorFeedback()
            reborn.load_state_dict(feedback.staged_state_dict())
            feedback = reborn
        feedback.acknowledge()
        sent, total = sent + Codec.decode(blob), total + delta
        residual = feedback.residual("w")
        assert residual is not None
        assert torch.allclose(sent + residual, total, rtol=0, atol=1e-7)


def test_without_feedback_the_sum_is_lost() -> None:
    """The identity above can fail: plain coding of a constant drift never sends most of it."""
    chosen, feedback = codec("topk(density=0.0156,chunk=4096)"), ErrorFeedback()
    drift = given_at(0, 4096)
    plain = sum((Codec.decode(chosen.encode(drift)) for _ in range(200)), torch.zeros(4096))
    fed = torch.zeros(4096)
    for _ in range(200):
        fed += Codec.decode(feedback.encode("w", drift, chosen))
        feedback.acknowledge()
    assert float((plain - 200 * drift).norm()) > 0.9 * float((200 * drift).norm())
    assert float((fed - 200 * drift).norm()) < 0.25 * float((200 * drift).norm())


def test_the_residual_counts_the_quantised_value() -> None:
    chosen, feedback = codec("topk(density=0.5,chunk=64)|int2(block=8)"), ErrorFeedback()
    delta = noise(256)
    back = Codec.decode(feedback.encode("w", delta, chosen))
    feedback.acknowledge()
    residual = feedback.residual("w")
    assert residual is not None
    assert torch.equal(residual, delta - back)
    assert bool((residual[back != 0] != 0).any())


def test_a_lossless_codec_leaves_a_residual_of_exactly_zero() -> None:
    for spec in ("fp32", "topk(density=1.0,chunk=4096)|fp32"):
        feedback = ErrorFeedback()
        for round_ in range(3):
            blob = feedback.encode("w", given_at(round_), codec(spec))
            assert torch.equal(Codec.decode(blob), given_at(round_))
            feedback.acknowledge()
        assert not bool(feedback.state_dict()["w"].any())


def test_nothing_is_final_before_the_acknowledgement() -> None:
    chosen, feedback = codec("int4(block=64)"), ErrorFeedback()
    assert feedback.residual("w") is None
    first = feedback.encode("w", given_at(0), chosen)
    assert feedback.state_dict() == {} and feedback.residual("w") is None
    staged = feedback.staged_state_dict()
    assert torch.equal(staged["w"], given_at(0) - Codec.decode(first))
    feedback.rollback()
    assert feedback.encode("w", given_at(0), chosen) == first
    feedback.acknowledge()
    assert torch.equal(feedback.state_dict()["w"], staged["w"])
    assert feedback.encode("w", given_at(0), chosen) != first
    feedback.rollback()
    feedback.acknowledge()  # nothing staged: nothing changes
    assert torch.equal(feedback.state_dict()["w"], staged["w"])


def test_names_are_kept_apart() -> None:
    chosen, feedback = codec("int4(block=64)"), ErrorFeedback()
    feedback.encode("a", noise(64, seed=1), chosen)
    feedback.encode("b", noise(64, 3, seed=2), chosen)
    feedback.acknowledge()
    before = feedback.state_dict()["a"]
    feedback.encode("b", noise(64, 3, seed=3), chosen)
    feedback.acknowledge()
    assert torch.equal(feedback.state_dict()["a"], before)
    assert feedback.state_dict()["b"].shape == (64, 3)


def test_a_non_finite_update_stages_nothing() -> None:
    chosen, feedback = codec("int4(block=64)"), ErrorFeedback()
    feedback.encode("w", given_at(0), chosen)
    feedback.acknowledge()
    kept = feedback.state_dict()["w"].clone()
    bad = given_at(1)
    bad[7] = float("nan")
    with pytest.raises(NonFiniteTensor, match="tensor w holds"):
        feedback.encode("w", bad, chosen)
    assert torch.equal(feedback.staged_state_dict()["w"], kept)


def test_tensors_given_and_handed_out_are_never_changed() -> None:
    chosen, feedback = codec("int4(block=64)"), ErrorFeedback()
    deltas = [given_at(round_) for round_ in range(5)]
    handed = []
    for delta in deltas:
        feedback.encode("w", delta, chosen)
        handed.append(feedback.staged_state_dict()["w"])
        feedback.acknowledge()
        handed.append(feedback.state_dict()["w"])
    copies = [each.clone() for each in handed]
    for delta in deltas:
        feedback.encode("w", delta, chosen)
        feedback.acknowledge()
    assert all(torch.equal(a, b) for a, b in zip(handed, copies, strict=True))
    assert all(torch.equal(delta, given_at(r)) for r, delta in enumerate(deltas))


def test_a_residual_of_another_model_is_refused() -> None:
    feedback = ErrorFeedback()
    feedback.load_state_dict({"w": torch.zeros(3, 4)})
    with pytest.raises(CodecError, match=r"residual of w has shape \[3, 4\], the tensor \[12\]"):
        feedback.encode("w", torch.zeros(12), codec("bf16"))


@pytest.mark.parametrize("decay", [-0.1, 1.01, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float) -> None:
    with pytest.raises(CodecError, match="not between 0 and 1"):
        ErrorFeedback(decay)


def test_pack_feeds_back_by_name_and_keeps_bf16_sums() -> None:
    feedback = ErrorFeedback()
    chosen = codec("*.bias=bf16; *=topk(density=0.1,chunk=64)|int8(block=64)")
    sent: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}
    for round_ in range(10):
        state = {
            "w": noise(20, 30, seed=round_).to(torch.bfloat16),
            "w.bias": noise(30, seed=round_ + 50),
        }
        for name, tensor in unpack(pack(state, chosen, feedback=feedback)).items():
            sent[name] = sent.get(name, torch.zeros(())) + tensor
            total[name] = total.get(name, torch.zeros(())) + state[name].float()
        feedback.acknowledge()
    for name, residual in feedback.state_dict().items():
        assert torch.allclose(sent[name] + residual, total[name], rtol=0, atol=1e-5)
    assert list(sent) == list(feedback.state_dict()) == ["w", "w.bias"]


# --- on disk ---------------------------------------------------------------------------------


def filled() -> ErrorFeedback:
    feedback = ErrorFeedback(decay=0.95)
    for name, shape in (("a.w", (40, 3)), ("b", ()), ("empty", (0, 4))):
        feedback.encode(name, noise(*shape, seed=3), codec("int4(block=8)"))
    feedback.acknowledge()
    return feedback


def test_saved_residuals_come_back_to_the_bit(tmp_path: Path) -> None:
    feedback = filled()
    feedback.encode("a.w", noise(40, 3), codec("int4(block=8)"))  # staged: not saved
    feedback.save(tmp_path / "ef")
    feedback.save(tmp_path / "ef")
    reborn = ErrorFeedback(decay=0.95)
    reborn.load(tmp_path / "ef")
    assert reborn.state_dict().keys() == feedback.state_dict().keys()
    for name, tensor in feedback.state_dict().items():
        assert torch.equal(reborn.state_dict()[name], tensor)
    feedback.rollback()
    update = noise(40, 3, seed=9)
    blobs = {each.encode("a.w", update, codec("int2(block=8)")) for each in (feedback, reborn)}
    assert len(blobs) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ef"]


def test_nothing_to_save_is_saved(tmp_path: Path) -> None:
    ErrorFeedback().save(tmp_path / "deep" / "ef")
    feedback = filled()
    feedback.load(tmp_path / "deep" / "ef")
    assert feedback.state_dict() == {}


def test_residuals_are_nobody_elses_to_read(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        filled().save(tmp_path / "ef")
    finally:
        os.umask(old)
    assert (tmp_path / "ef").stat().st_mode & 0o777 == 0o700
    files = sorted((tmp_path / "ef").iterdir())
    assert [path.name for path in files] == ["residual.json", "residual.safetensors"]
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in files)


@pytest.mark.parametrize("file", ["residual.json", "residual.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped", "longer"])
def test_a_damaged_residual_is_refused_and_the_old_one_kept(
    tmp_path: Path, file: str, damage: str
) -> None:
    filled().save(tmp_path / "ef")
    path = tmp_path / "ef" / file
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle] ^= 1
    flipped = bytes(data)
    data[middle] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(
            {
                "empty": b"",
                "cut": bytes(data[:-3]),
                "flipped": flipped,
                "longer": bytes(data) + b"}",
            }[damage]
        )
    feedback = ErrorFeedback()
    feedback.load_state_dict({"kept": torch.ones(2)})
    with pytest.raises(CheckpointCorrupt) as caught:
        feedback.load(tmp_path / "ef")
    assert "\n" not in str(caught.value)
    assert list(feedback.state_dict()) == ["kept"]


@pytest.mark.parametrize("text", ["[]", "null", "{}", '"x"', '{"sha256": 3}'])
def test_metadata_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    filled().save(tmp_path / "ef")
    (tmp_path / "ef" / "residual.json").write_text(text)
    with pytest.raises(CheckpointCorrupt):
        ErrorFeedback().load(tmp_path / "ef")


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match="cannot be read"):
        ErrorFeedback().load(tmp_path / "none")
