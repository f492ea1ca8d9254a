"""A head of the site's own, and held-out examples through both halves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.calls import Answer, Call
from flower_geo.data.instructions import collate
from flower_geo.errors import ConfigError, DataError
from flower_geo.evaluation import evaluate_instructions
from flower_geo.models import snapshot
from flower_geo.training import InnerConfig
from flower_geo.training.split import MODES, Auxiliary, Mode
from flower_geo.training.split.site import micro_of
from tests.training.split.halves import CONFIG, adapted, batch_stream, pair
from tests.training.split.test_sites import Sites

TASK = InnerConfig(lr=0.002, schedule="constant", weight_decay=0.0)


@pytest.mark.parametrize("mode", ["cse", "sage"])
def test_both_halves_learn_though_nothing_or_little_comes_back(mode: Mode) -> None:
    settings = Auxiliary(width=32, lr=1e-2, align_every=5, align_steps=8)
    both = pair(mode, TASK, auxiliary=settings)
    batches = [batch_stream(seed=seed)() for seed in range(3)]
    turn = cycle(batches)
    losses: list[float] = []
    errors: list[float | None] = []

    def note(step: int, loss: Tensor) -> None:
        losses.append(float(loss))
        if step % 5 == 1:
            errors.append(both.loop.alignment_error)

    before = both.weights()
    both.loop.run(lambda: next(turn), 45, on_step=note)
    assert sum(losses[-3:]) < sum(losses[:3]) - 0.5
    site = snapshot(both.loop.half)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in site.items())
    forwards = [a for c, a in zip(both.channel.calls, both.channel.answers, strict=True)
                if c.kind == "forward"]  # fmt: skip
    back = [step for step, answer in enumerate(forwards, 1) if answer.blobs]
    if mode == "cse":
        assert back == [] and errors == [None] * 9
    else:
        assert back == list(range(1, 46, 5))
        found = [error for error in errors if error is not None]
        assert len(found) == 9
        assert max(found[-3:]) < 0.7 * found[0]


def test_alignment_brings_the_heads_gradient_to_the_clouds() -> None:
    """With the bottom and the cloud at rest the distance itself falls."""
    still = replace(TASK, lr=0.0)
    settings = Auxiliary(width=32, lr=1e-2, align_every=1, align_steps=5)
    both = pair("sage", still, auxiliary=settings)
    batch = batch_stream("left")()
    errors: list[float] = []

    def note(*_: Any) -> None:
        errors.append(both.loop.alignment_error or 0.0)

    both.loop.run(lambda: batch, 20, on_step=note)
    assert errors[-1] < 0.3 * errors[0]
    assert sorted(errors[:5], reverse=True) == errors[:5]


def test_the_sites_head_learns_its_own_loss() -> None:
    both = pair("cse", TASK, auxiliary=Auxiliary(width=32))
    batch = batch_stream()()
    micro = micro_of(batch, torch.device("cpu"))
    loop = both.loop
    assert micro is not None and loop._probe is not None

    def own() -> float:
        assert loop._probe is not None
        return float(loop._probe.loss(loop._link.below(micro), micro).detach())

    before = own()
    both.loop.run(lambda: batch, 40)
    assert own() < before - 0.5


def test_rows_of_padding_alone_have_no_part_in_the_head() -> None:
    both = pair("cse")
    probe = both.loop._probe
    assert probe is not None
    with torch.no_grad():
        probe.out.normal_(generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    found = probe(hidden, mask)
    changed = hidden.clone()
    changed[1, :2] = 7.0
    assert bool(found.isfinite().all())
    assert torch.equal(probe(changed, mask)[1, 2:], found[1, 2:])
    assert not torch.equal(probe(changed)[1, 2:], found[1, 2:])
    # Causal: later tokens change nothing before them.
    changed = hidden.clone()
    changed[0, 4:] = 7.0
    torch.testing.assert_close(probe(changed, mask)[0, :4], found[0, :4])


def test_settings_of_the_head_are_checked() -> None:
    for name in ("width", "lr", "align_every", "align_steps"):
        with pytest.raises(ConfigError, match=name.replace("_", "-")):
            Auxiliary(**{name: 0})


# -- held-out examples --------------------------------------------------------


@dataclass(frozen=True)
class Row:
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None


def examples() -> list[Row]:
    generator = torch.Generator().manual_seed(4)
    rows = []
    for index in range(7):
        ids = torch.randint(1, 48, (4 + index,), generator=generator)
        labels = ids.clone()
        labels[:2] = -100
        rows.append(Row(ids, labels if index else torch.full_like(ids, -100)))
    return rows


def padded(rows: list[Any]) -> dict[str, Tensor]:
    return collate(rows, 0)


def turned(rows: list[Any]) -> dict[str, Tensor]:
    """Padded on the left."""
    return {name: tensor.flip(1) for name, tensor in padded(rows).items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("collated", [padded, turned], ids=["right", "left"])
def test_held_out_figures_are_those_of_the_whole_model(mode: Mode, collated: Any) -> None:
    both = pair(mode, dropout=0.2)
    wanted = evaluate_instructions(adapted(), examples(), collated, 2)
    states = both.loop.state_dict(), both.engine.state_dict()[0], torch.get_rng_state()
    found = both.loop.evaluate(examples(), collated, 2)
    assert found == wanted
    assert found.tokens > 10 and math.isfinite(found.loss)
    fewer = evaluate_instructions(adapted(), examples(), collated, 2, max_tokens=8)
    assert both.loop.evaluate(examples(), collated, 2, max_tokens=8) == fewer != wanted
    after = both.loop.state_dict(), both.engine.state_dict()[0], torch.get_rng_state()
    for one, other in zip(states[:2], after[:2], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(states[2], after[2])
    assert both.loop.half.bottom.training


def test_without_labels_there_is_nothing_to_evaluate() -> None:
    with pytest.raises(DataError, match="no held-out answer"):
        pair("vanilla").loop.evaluate(examples()[:1], padded, 2)


@pytest.mark.parametrize("mode", ["vanilla", "u-shape", "sfl-v1", "sfl-v2"])
def test_held_out_figures_follow_the_training(mode: Mode) -> None:
    both = pair(mode, replace(CONFIG, schedule="constant"), steps=3)
    before = both.loop.evaluate(examples(), padded, 3)
    both.loop.run(batch_stream(), 3)
    after = both.loop.evaluate(examples(), padded, 3)
    model = adapted()
    weights = both.weights()
    if mode == "sfl-v1":
        both.engine.average()
        weights = both.weights()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in weights:
                parameter.copy_(weights[name])
    assert after == evaluate_instructions(model, examples(), padded, 3) != before


def evaluation() -> Call:
    both = pair("sfl-v2")
    both.loop.evaluate(examples(), padded, 8)
    return both.channel.calls[0]


def test_in_turns_a_site_evaluates_the_rounds_begin_and_the_rounds_end() -> None:
    call = evaluation()
    sites = Sites("sfl-v2", CONFIG, 1, ("a", "b"))
    wanted = sites_answer(sites, "b", call)
    sites.loops["a"].run(batch_stream(), 1)
    assert sites_answer(sites, "b", call) == wanted  # a has moved on, b has not begun
    early: list[Any] = []
    sites.engine.submit("a", call, early.append)
    assert not sites.engine.work(0.0) and not early  # b's step is still to come
    sites.loops["b"].run(batch_stream(seed=1), 1)
    sites.engine.work(0.0)
    late = sites_answer(sites, "b", call)
    assert early == [late] and late != wanted


def sites_answer(sites: Sites, site: str, call: Call) -> Answer:
    answers: list[Any] = []
    sites.engine.submit(site, call, answers.append)
    while not answers:
        assert sites.engine.work(0.0)
    assert isinstance(answers[0], Answer)
    return answers[0]
