from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from flower_geo.errors import DataError
from flower_geo.training import (
    InnerConfig,
    InnerLoop,
    InstructionResult,
    evaluate_instructions,
    exact_match,
)
from tests.training.conftest import VOCAB, adapted, small, with_dropout


@dataclass(frozen=True)
class Row:
    input_ids: Tensor
    labels: Tensor


def rows(count: int, seed: int = 1) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for index in range(count):
        length = 4 + int(torch.randint(0, 9, (), generator=generator))
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        labels = ids.clone()
        labels[: 1 + index % 3] = -100
        found.append(Row(ids, labels))
    return found


def collate(examples: list[Row]) -> dict[str, Tensor]:
    def padded(tensors: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    return {
        "input_ids": padded([e.input_ids for e in examples], 0),
        "labels": padded([e.labels for e in examples], -100),
        "attention_mask": padded([torch.ones_like(e.input_ids) for e in examples], 0),
    }


def by_hand(model: Any, examples: list[Row]) -> tuple[float, int, int]:
    loss, tokens, correct = 0.0, 0, 0
    with torch.no_grad():
        for row in examples:
            logits = model(input_ids=row.input_ids[None]).logits[0, :-1]
            keep = row.labels[1:] != -100
            losses = torch.nn.functional.cross_entropy(
                logits[keep], row.labels[1:][keep], reduction="none"
            )
            loss, tokens = loss + float(losses.sum()), tokens + int(keep.sum())
            correct += int((logits.argmax(-1) == row.labels[1:])[keep].sum())
    return loss, tokens, correct


@pytest.mark.parametrize("size", [1, 3, 100])
def test_sums_are_those_of_each_row_alone(size: int) -> None:
    model, examples = adapted(small("llama-nano")).eval(), rows(7)
    # a few the model gets right
    for row in examples[:3]:
        best = model(input_ids=row.input_ids[None]).logits[0, -2].argmax()
        row.labels[-1] = best
    loss, tokens, correct = by_hand(model, examples)
    result = evaluate_instructions(model, examples, collate, size)
    assert (result.tokens, result.correct) == (tokens, correct) and correct >= 3
    assert result.loss_sum == pytest.approx(loss, rel=1e-5)
    assert result.loss == pytest.approx(loss / tokens) and result.accuracy == correct / tokens


def test_a_part_is_spread_over_the_examples_that_count() -> None:
    model, examples = small(), rows(12)
    for row in examples[:4]:
        row.labels.fill_(-100)
    whole = evaluate_instructions(model, examples, collate, 4)
    part = evaluate_instructions(model, examples, collate, 4, max_tokens=whole.tokens // 2)
    least = evaluate_instructions(model, examples, collate, 4, max_tokens=1)
    assert 0.25 * whole.tokens < part.tokens < 0.75 * whole.tokens
    assert 0 < least.tokens < part.tokens
    assert evaluate_instructions(model, examples, collate, 4, max_tokens=10**6) == whole


def test_nothing_of_the_model_changes() -> None:
    model = with_dropout().train()
    state = torch.get_rng_state()
    first = evaluate_instructions(model, rows(3), collate, 2)
    assert evaluate_instructions(model, rows(3), collate, 2) == first
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in model.parameters())


def test_results_add_up_by_token() -> None:
    total = InstructionResult(30.0, 10, 4) + InstructionResult(10.0, 10, 1)
    assert (total.loss, total.accuracy) == (2.0, 0.25)
    assert math.isnan(InstructionResult(0.0, 0, 0).accuracy)


@pytest.mark.parametrize("examples", [[], [Row(torch.arange(5), torch.full((5,), -100))]])
def test_nothing_to_evaluate_is_refused(examples: list[Row]) -> None:
    with pytest.raises(DataError, match="no held-out answer"):
        evaluate_instructions(small(), examples, collate, 2)


class Letters:
    """A tokenizer of one token a letter; 0 ends a text."""

    eos_token_id = 0

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(chr(96 + token) if token < 27 else " " for token in ids)


def ids_of(text: str) -> Tensor:
    return torch.tensor([27 if letter == " " else ord(letter) - 96 for letter in text])


@pytest.fixture(scope="module", params=["gpt2-nano", "llama-nano"])
def taught(request: pytest.FixtureRequest) -> Any:
    """A model that has learned three answers by heart."""
    model = small(request.param)
    texts = [("abc", "xyz"), ("b", "q r"), ("hello", "w")]
    batch = collate([
        Row(torch.cat([ids_of(a), ids_of(b), torch.zeros(1, dtype=torch.long)]), torch.cat(
            [torch.full((len(a),), -100), ids_of(b), torch.zeros(1, dtype=torch.long)]))
        for a, b in texts
    ])  # fmt: skip
    config = InnerConfig(lr=3e-3, schedule="constant", weight_decay=0.0)
    assert InnerLoop(model, config).run(lambda: batch, steps=60).loss_last < 0.1
    return model


@pytest.mark.parametrize("size", [1, 8])
def test_exact_match_counts_answers_given_word_for_word(taught: Any, size: int) -> None:
    prompts = [ids_of(text) for text in ("hello", "abc", "b", "abc")]
    answers = ["w", " xyz", "q  r\n", "xy"]
    found = exact_match(taught, Letters(), prompts, answers, 8, batch_size=size)
    assert found == (3, 4)
    assert taught.training
    # Too short to end an answer: what stands there so far is compared.
    assert exact_match(taught, Letters(), prompts[1:2], ["xy"], 2) == (1, 1)
    # Longer than the model can look back: the last tokens count.
    long = torch.cat([torch.full((40,), 27), ids_of("abc")])
    assert exact_match(taught, Letters(), [long], ["xyz"], 4)[1] == 1


def test_prompts_and_answers_must_pair_up() -> None:
    for prompts, answers in (([ids_of("a")], []), ([torch.tensor([])], ["a"])):
        with pytest.raises(DataError, match="do not pair up"):
            exact_match(small(), Letters(), prompts, answers)
    assert exact_match(small(), Letters(), [], []) == (0, 0)
