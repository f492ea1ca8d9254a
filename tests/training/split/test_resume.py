"""A round saved at any step and loaded into new objects goes on bit-equal."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flower_geo.errors import TrainingError
from flower_geo.models import load_state, snapshot
from flower_geo.training.split import MODES, Auxiliary, Mode, Wire
from tests.training.split.halves import CONFIG, EXACT, Pair, adapted, batch_stream, pair

LOSSY = Wire(
    codec_activations="int4", codec_gradients="int8", codec_whole="bf16",
    delta_bytes=2000, activation_noise=0.1,
)  # fmt: skip
STEPS = 4
OPTIONS: dict[str, Any] = {
    "config": replace(CONFIG, grad_accum=2), "dropout": 0.2, "steps": STEPS,
    "auxiliary": Auxiliary(width=8, align_every=2, align_steps=2),
}  # fmt: skip


def source() -> Any:
    return batch_stream(samples=7, rows=2)


def kept(tensors: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """As a snapshot on disk gives them back."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "s")
    return load_file(folder / "s")


def restored(mode: Mode, wire: Wire, saved: dict[str, Any], folder: Path) -> Pair:
    again = pair(mode, wire=wire, begin=False, seed=77, **OPTIONS)
    load_state(again.loop.half, kept(saved["weights"], folder))
    again.loop.load_state_dict(kept(saved["inner"], folder))
    tensors, meta = saved["cloud"]
    again.engine.load_state_dict(kept(tensors, folder), json.loads(json.dumps(meta)))
    return again


@pytest.mark.parametrize("wire", [EXACT, LOSSY], ids=["exact", "lossy"])
@pytest.mark.parametrize("mode", MODES)
def test_a_saved_step_goes_on_to_the_same_bits(mode: Mode, wire: Wire, tmp_path: Path) -> None:
    both = pair(mode, wire=wire, **OPTIONS)
    saved: list[dict[str, Any]] = []

    def save(step: int, _: Tensor) -> None:
        assert both.engine.boundary == step
        saved.append(
            {
                "weights": snapshot(both.loop.half), "inner": both.loop.state_dict(),
                "cloud": both.engine.state_dict(), "so_far": both.loop.so_far(),
            }
        )  # fmt: skip

    result = both.loop.run(source(), STEPS, position=3, span=5, on_step=save)
    for step in (1, 3):
        again = restored(mode, wire, saved[step - 1], tmp_path)
        assert again.engine.boundary == step
        stream = source()
        for _ in range(step * 2):
            stream()
        found = again.loop.run(stream, STEPS, position=3, span=5, carried=saved[step - 1]["so_far"])
        assert replace(found, seconds=0.0) == replace(result, seconds=0.0)
        assert all(torch.equal(again.weights()[n], t) for n, t in both.weights().items())
        one, other = both.loop.state_dict(), again.loop.state_dict()
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        ours, theirs = both.engine.state_dict(), again.engine.state_dict()
        assert ours[1] == theirs[1] and ours[0].keys() == theirs[0].keys()
        assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])
    assert any("wire/lower/" in name for name in saved[0]["inner"]) == (wire is LOSSY)


def test_a_second_round_goes_on_with_optimizer_and_references(tmp_path: Path) -> None:
    both = pair("vanilla", wire=LOSSY, **OPTIONS)
    stream = source()
    both.loop.run(stream, STEPS, position=0, span=5)
    inner, cloud = both.loop.state_dict(), both.engine.state_dict()
    saved = {"weights": snapshot(both.loop.half), "inner": inner, "cloud": cloud}
    both.engine.begin(2, ["a"], 5, 5, STEPS)
    both.channel.calls.clear()
    both.loop.run(stream, STEPS, position=5, span=5)
    assert any(call.meta["delta"] for call in both.channel.calls if call.kind == "forward")

    again = restored("vanilla", LOSSY, saved, tmp_path)
    again.engine.begin(2, ["a"], 5, 5, STEPS)
    stream = source()
    for _ in range(2 * STEPS):
        stream()
    again.loop.run(stream, STEPS, position=5, span=5)
    assert all(torch.equal(again.weights()[n], t) for n, t in both.weights().items())


@pytest.mark.parametrize("lost", ["site", "cloud"])
def test_references_lost_on_one_side_are_dropped_on_both(lost: str) -> None:
    both = pair("u-shape", wire=LOSSY, **OPTIONS)
    stream = source()
    both.loop.run(stream, STEPS)
    fresh = pair("u-shape", wire=LOSSY, **OPTIONS)
    if lost == "site":
        both.loop.load_state_dict(fresh.loop.state_dict())
        both.engine.begin(2, ["a"], 0, 5, STEPS)
    else:
        tensors, meta = fresh.engine.state_dict()
        both.engine.load_state_dict(tensors, meta)
    both.channel.calls.clear()
    both.channel.answers.clear()
    result = both.loop.run(stream, STEPS)
    assert result.steps == STEPS
    assert [bool(answer.meta.get("again")) for answer in both.channel.answers[:2]] == [True, False]
    first, second = both.channel.calls[:2]
    assert (first.step, first.micro, second.step, second.micro) == (1, 0, 1, 0)
    assert second.meta["delta"] == []
    ends = (both.loop.state_dict(), both.engine.state_dict()[0])
    site = {k.removeprefix("split/wire/"): v for k, v in ends[0].items() if "wire/" in k}
    cloud = {k.removeprefix("lane/0/wire/"): v for k, v in ends[1].items() if "wire/" in k}
    site.pop("noise")
    cloud.pop("noise")
    assert site.keys() == cloud.keys() and len(site) > 2
    assert all(torch.equal(site[name], cloud[name]) for name in site)


def test_a_state_of_another_kind_is_refused() -> None:
    both = pair("vanilla")
    tensors, meta = both.engine.state_dict()
    other = pair("sfl-v2")
    with pytest.raises(TrainingError, match="mode vanilla"):
        other.engine.load_state_dict(tensors, meta)
    wide = pair("vanilla", family="llama")
    with pytest.raises(TrainingError, match="does not fit"):
        wide.engine.load_state_dict(tensors, meta)
    with pytest.raises(TrainingError, match="not whole"):
        both.engine.load_state_dict(tensors, {"version": 1, "mode": "vanilla"})
    # Still whole.
    assert both.loop.run(batch_stream(), 2).steps == 2


def test_no_state_is_taken_within_a_step() -> None:
    both = pair("vanilla", replace(CONFIG, grad_accum=2))
    stream, calls = batch_stream(), iter(range(10))
    submit = both.channel.submit

    def broken(call: Any) -> Any:
        if next(calls) == 1:
            raise OSError("cable")
        future = submit(call)
        future.result()
        return future

    both.channel.submit = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="cable"):
        both.loop.run(stream, 2)
    assert both.engine.boundary is None
    with pytest.raises(TrainingError, match="midst of a step"):
        both.engine.state_dict()


def test_what_is_trained_may_change_from_round_to_round() -> None:
    both = pair("vanilla", replace(CONFIG, weight_decay=0.0))
    both.loop.run(batch_stream(), 2)
    middle = both.weights()
    for model in (both.site_model, both.cloud_model):
        for name, parameter in model.named_parameters():
            if "lora_A" in name:
                parameter.requires_grad_(False)
    both.engine.begin(2, ["a"], 2, 2, 2)
    both.loop.run(batch_stream(seed=1), 2, position=2)
    after = both.weights()
    assert after and all("lora_B" in name for name in after)
    assert all(not torch.equal(tensor, middle[name]) for name, tensor in after.items())
    frozen = {n: p for n, p in both.engine.part.named_parameters() if "lora_A" in n}
    assert all(torch.equal(p.detach(), middle[n]) for n, p in frozen.items())
    assert adapted() is not None
