"""Error feedback as a state machine, with codecs that change, in bf16, and whose memory it is."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from torch import Tensor

from flower_geo.compression import Codec, ErrorFeedback, codec
from flower_geo.errors import CodecError
from tests.compression.blobs import noise
from tests.compression.test_feedback import LOSSY, given_at


class Bookkeeping(RuleBasedStateMachine):
    """Any order of rounds, losses, repeats, restarts and codecs keeps the sum."""

    SIZE = 700

    def __init__(self) -> None:
        super().__init__()
        self.feedback = ErrorFeedback()
        self.sent = torch.zeros(self.SIZE, dtype=torch.float64)
        self.total = torch.zeros(self.SIZE, dtype=torch.float64)
        self.largest = 0.0
        self.rounds = 0
        self.staged: tuple[Tensor, bytes] | None = None
        self.folder = Path(tempfile.mkdtemp())

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @rule(
        spec=st.sampled_from([*LOSSY, "fp32"]), seed=st.integers(0, 10**6),
        scale=st.sampled_from([1e-6, 1e-3, 1.0, 50.0]),
    )  # fmt: skip
    def train(self, spec: str, seed: int, scale: float) -> None:
        update = noise(self.SIZE, seed=seed, scale=scale)
        blob = self.feedback.encode("w", update, codec(spec))
        self.largest = max(self.largest, float(update.abs().max()))
        self.staged = (update, blob)
        update_was = update.clone()
        if seed % 2:  # asked again: the same bytes
            assert self.feedback.encode("w", update, codec(spec)) == blob
        assert torch.equal(update, update_was)

    @rule()
    def lose(self) -> None:
        self.feedback.rollback()
        self.staged = None

    @rule()
    def acknowledge(self) -> None:
        self.feedback.acknowledge()
        self._count()

    @rule()
    def restart_acknowledged(self) -> None:
        """The site stored what was staged, and the coordinator names that round."""
        reborn = ErrorFeedback()
        reborn.load_state_dict(self.feedback.staged_state_dict())
        self.feedback = reborn
        self._count()

    @rule()
    def restart_from_disk(self) -> None:
        """The site stored what was final; what was staged is gone with the process."""
        self.feedback.save(self.folder / "ef")
        self.feedback = ErrorFeedback()
        self.feedback.load(self.folder / "ef")
        self.staged = None

    def _count(self) -> None:
        if self.staged is not None:
            update, blob = self.staged
            self.total += update.double()
            self.sent += Codec.decode(blob).double()
            self.rounds += 1
            self.staged = None

    @invariant()
    def nothing_is_lost(self) -> None:
        residual = self.feedback.residual("w")
        held = torch.zeros(self.SIZE) if residual is None else residual
        error = float((self.sent + held.double() - self.total).abs().max())
        assert error <= 2.0**-22 * self.largest * (self.rounds + 1) ** 2


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=25, stateful_step_count=20)


def test_a_bf16_residual_takes_half_and_loses_nothing_on_average() -> None:
    """Rounded to nearest, a drift far below the residual would vanish in every round."""
    chosen = codec("topk(density=0.0156,chunk=4096)")
    whole, half = ErrorFeedback(), ErrorFeedback(dtype="bf16", seed=3)
    drift = torch.full((4096,), 1e-3)
    drift[::7] = 0.3  # keeps the selection busy
    for feedback in (whole, half):
        feedback.load_state_dict({"w": torch.full((4096,), 1.0)})
    sent = {id(each): torch.zeros(4096) for each in (whole, half)}
    for _ in range(60):
        for each in (whole, half):
            sent[id(each)] += Codec.decode(each.encode("w", drift, chosen))
            each.acknowledge()
    kept = half.state_dict()["w"]
    assert kept.dtype == torch.bfloat16 and whole.state_dict()["w"].dtype == torch.float32
    owed = 1.0 + 60 * drift - sent[id(half)] - kept.float()
    quiet = torch.ones(4096, dtype=torch.bool)
    quiet[::7] = False
    # 60 steps of 0.001 on a residual of 1, whose next bf16 neighbour is 0.0078 away
    assert float(owed[quiet].mean().abs()) < 0.1 * 60e-3
    assert float((1.0 + 60 * drift - sent[id(whole)] - whole.state_dict()["w"]).abs().max()) < 1e-4
    assert float(owed.abs().max()) < 60**0.5 * 6 * 2.0**-8


def test_stochastic_rounding_goes_to_a_neighbour_and_is_fair() -> None:
    values = noise(200_000, seed=4) * 3
    values[:4] = torch.tensor([0.0, -0.0, 3.4028e38, -3.4028e38])
    feedback = ErrorFeedback(dtype="bf16", seed=1)
    feedback.load_state_dict({"w": values})
    rounded = feedback.state_dict()["w"]
    assert rounded.dtype == torch.bfloat16 and bool(torch.isfinite(rounded).all())
    low = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)  # toward zero
    step = rounded.float() - low
    gap = ((values.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32) - low
    assert bool(((step == 0) | (step == gap)).all())
    error = (rounded.float() - values)[4:].double()
    assert float(error.mean().abs()) < 5 * float(error.std()) / values.numel() ** 0.5
    exact = values.to(torch.bfloat16).float()
    feedback.load_state_dict({"w": exact})
    assert torch.equal(feedback.state_dict()["w"].float(), exact)


def test_bf16_residuals_are_the_same_again_and_others_under_another_seed() -> None:
    def after(seed: int, lose: bool = False) -> Tensor:
        feedback = ErrorFeedback(dtype="bf16", seed=seed)
        for round_ in range(3):
            feedback.encode("w", given_at(round_), codec("int2(block=64)"))
            if lose:
                feedback.rollback()
                feedback.encode("w", given_at(round_), codec("int2(block=64)"))
            feedback.acknowledge()
        return feedback.state_dict()["w"]

    assert torch.equal(after(1), after(1)) and torch.equal(after(1), after(1, lose=True))
    assert not torch.equal(after(1), after(2))


def test_residuals_change_their_dtype_with_the_configuration(tmp_path: Path) -> None:
    half = ErrorFeedback(dtype="bf16")
    half.encode("w", given_at(0), codec("int2(block=64)"))
    half.acknowledge()
    half.save(tmp_path / "ef")
    whole = ErrorFeedback()
    whole.load(tmp_path / "ef")
    assert torch.equal(whole.state_dict()["w"], half.state_dict()["w"].float())
    back = ErrorFeedback(dtype="bf16")
    back.load_state_dict(whole.state_dict())
    assert torch.equal(back.state_dict()["w"], half.state_dict()["w"])


def test_another_dtype_is_refused() -> None:
    with pytest.raises(CodecError, match="feedback dtype 'fp16' is not one of fp32, bf16"):
        ErrorFeedback(dtype="fp16")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_loaded_tensors_may_be_changed_by_their_owner(dtype: str) -> None:
    whole = noise(8, 6)
    for mine in (whole, whole.t(), whole[2:], whole.to(torch.bfloat16)):
        feedback = ErrorFeedback(dtype=dtype)
        feedback.load_state_dict({"w": mine})
        held = feedback.state_dict()["w"].clone()
        mine += 100.0
        assert torch.equal(feedback.state_dict()["w"], held)
        mine -= 100.0


def test_loading_from_a_file_maps_it_and_copies_nothing(tmp_path: Path) -> None:
    feedback = ErrorFeedback()
    feedback.load_state_dict({"w": noise(4_000_000)})
    feedback.save(tmp_path / "ef")
    reborn = ErrorFeedback()
    reborn.load(tmp_path / "ef")
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / "ef" / "residual.safetensors") in maps.read_text()
    # The folder may be replaced while it is in use.
    feedback.save(tmp_path / "ef")
    assert torch.equal(reborn.state_dict()["w"], feedback.state_dict()["w"])
