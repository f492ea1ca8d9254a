"""How well a model answers held-out instructions: loss, token accuracy, exact match."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_geo.errors import DataError
from flower_geo.evaluation.batch import IGNORED, counted, counted_logits
from flower_geo.evaluation.precision import Precision, autocast, device_of
from flower_geo.evaluation.text import evaluating

__all__ = [
    "Example",
    "Examples",
    "InstructionResult",
    "evaluate_instructions",
    "exact_match",
    "held_out_batches",
]


class Example(Protocol):
    """One row: ``input_ids`` and ``labels``, both ``LongTensor[n]``."""

    @property
    def labels(self) -> Tensor:
        """Next tokens to predict, -100 where there is none."""


class Examples(Protocol):
    """Examples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True)
class InstructionResult:
    """Sums over the labels that count.

    Attributes:
        loss_sum: of the losses, in nats.
        tokens: labels that count.
        correct: those the model holds for the likeliest.
    """

    loss_sum: float
    tokens: int
    correct: int

    @property
    def loss(self) -> float:
        """Mean loss per token in nats; NaN when there was none."""
        return self.loss_sum / self.tokens if self.tokens else math.nan

    @property
    def accuracy(self) -> float:
        """Share of tokens that the model holds for the likeliest; NaN when there was none."""
        return self.correct / self.tokens if self.tokens else math.nan

    def __add__(self, other: InstructionResult) -> InstructionResult:
        return InstructionResult(
            self.loss_sum + other.loss_sum, self.tokens + other.tokens, self.correct + other.correct
        )


@torch.no_grad()
def evaluate_instructions(
    model: nn.Module,
    examples: Examples,
    collate: Callable[[list[Any]], Mapping[str, Tensor]],
    batch_size: int,
    max_tokens: int | None = None,
    *,
    precision: Precision = "fp32",
) -> InstructionResult:
    """Loss and token accuracy over the labels that count; the loss is summed in fp64.

    Neither the model nor its training mode nor any random state is changed.

    Args:
        model: a causal language model of transformers, or a PEFT model.
        examples: rows with ``input_ids`` and ``labels``, ``LongTensor[n]`` each.
        collate: makes a batch of a list of them (see ``flower_geo.evaluation.batch``).
        batch_size: examples a forward pass; ones of like length go together.
        max_tokens: look at about that many labels (at least one example), in
            examples spread evenly; None = all.
        precision: as in ``InnerConfig``.

    Raises:
        DataError: there is no example, or none with a label that counts.
    """
    device = device_of(model)
    total = torch.zeros((), dtype=torch.float64, device=device)
    correct = torch.zeros((), dtype=torch.long, device=device)
    tokens = 0
    with evaluating(model):
        for batch in held_out_batches(examples, collate, batch_size, max_tokens):
            places = counted(batch)
            with autocast(precision, device):
                logits, targets = counted_logits(model, batch, places, device)
            losses = functional.cross_entropy(logits, targets, reduction="none")
            total += losses.sum(dtype=torch.float64)
            correct += (logits.argmax(dim=-1) == targets).sum()
            tokens += len(places)
    return InstructionResult(float(total), tokens, int(correct))


def held_out_batches(
    examples: Examples,
    collate: Callable[[list[Any]], Mapping[str, Tensor]],
    batch_size: int,
    max_tokens: int | None = None,
) -> Iterator[Mapping[str, Tensor]]:
    """The batches that :func:`evaluate_instructions` looks at; arguments and errors are its."""
    counts = [int((examples[i].labels[1:] != IGNORED).sum()) for i in range(len(examples))]
    useful = [index for index, count in enumerate(counts) if count]
    if not useful:
        raise DataError("no held-out answer to evaluate on; give more examples or a longer seq-len")
    chosen = _spread(useful, sum(counts), max_tokens)
    chosen.sort(key=lambda index: examples[index].labels.numel())
    for begin in range(0, len(chosen), batch_size):
        yield collate([examples[index] for index in chosen[begin : begin + batch_size]])


@torch.no_grad()
def exact_match(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Tensor],
    answers: Sequence[str],
    max_new_tokens: int = 32,
    *,
    batch_size: int = 8,
    precision: Precision = "fp32",
) -> tuple[int, int]:
    """How many prompts are answered word for word, and how many were asked.

    Answers are written greedily and end at an end-of-text token; white space is
    not told apart.  Nothing of the model changes, and nothing random is drawn.

    Args:
        model: a causal language model of transformers, or a PEFT model.
        tokenizer: the tokenizer that belongs to it.
        prompts: ``LongTensor[n]`` each, n at least 1.
        answers: the text wanted after each prompt.
        max_new_tokens: longest answer, in tokens.
        batch_size: prompts at once.
        precision: as in ``InnerConfig``.

    Raises:
        DataError: prompts and answers do not pair up, or a prompt is empty.
    """
    if len(prompts) != len(answers) or any(prompt.numel() == 0 for prompt in prompts):
        raise DataError(
            f"{len(prompts)} prompts and {len(answers)} answers do not pair up, or a prompt is "
            "empty; give one answer to each prompt"
        )
    ends = _ends(model, tokenizer)
    order = sorted(range(len(prompts)), key=lambda index: prompts[index].numel())
    hits = 0
    with evaluating(model), autocast(precision, device_of(model)):
        for begin in range(0, len(order), batch_size):
            chosen = order[begin : begin + batch_size]
            written = _write(model, [prompts[index] for index in chosen], ends, max_new_tokens)
            for index, ids in zip(chosen, written, strict=True):
                text = tokenizer.decode(ids, skip_special_tokens=True)
                hits += _plain(text) == _plain(answers[index])
    return hits, len(prompts)


def _write(
    model: nn.Module, prompts: list[Tensor], ends: set[int], max_new_tokens: int
) -> list[list[int]]:
    """What the model holds for likeliest after each prompt, up to an end."""
    device = device_of(model)
    room = _context(model)
    if room is not None:  # the last tokens that leave room for an answer
        max_new_tokens = min(max_new_tokens, room - 1)
        prompts = [prompt[max_new_tokens - room :] for prompt in prompts]
    longest = max(prompt.numel() for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padded on the left: all go on at one place
        ids[row, longest - prompt.numel() :] = prompt
        mask[row, longest - prompt.numel() :] = 1
    ids, mask = ids.to(device), mask.to(device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    written: list[list[int]] = [[] for _ in prompts]
    ended = [False] * len(prompts)
    cache: Any = None
    for _ in range(max_new_tokens):
        output: Any = model(
            input_ids=ids, attention_mask=mask, position_ids=positions, cache=cache,
            use_cache=True,
        )  # fmt: skip
        cache, token = output.past_key_values, output.logits[:, -1].argmax(dim=-1)
        for row, value in enumerate(token.tolist()):
            ended[row] = ended[row] or value in ends
            if not ended[row]:
                written[row].append(value)
        if all(ended):
            break
        ids, positions = token[:, None], positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
    return written


def _ends(model: nn.Module, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: the tokenizer's, and those the model names."""
    named = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = named if isinstance(named, list | tuple) else [named]
    return {int(end) for end in (tokenizer.eos_token_id, *several) if end is not None}


def _context(model: nn.Module) -> int | None:
    """The most tokens the model can look at; None where it names no limit."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(text, "max_position_embeddings", None)
    return int(found) if found else None


def _plain(text: str) -> str:
    return " ".join(text.split())


def _spread(useful: list[int], tokens: int, max_tokens: int | None) -> list[int]:
    """Examples to look at, evenly spread; about ``max_tokens`` of ``tokens`` labels."""
    count = len(useful)
    if max_tokens is not None and max_tokens < tokens:
        count = max(1, round(count * max_tokens / tokens))
    return [useful[index * len(useful) // count] for index in range(count)]
