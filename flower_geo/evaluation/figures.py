"""The figures of instruction data: what a site says of its own, a coordinator of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from flower_geo.data.instructions import InstructionCorpus, collate, pad_id_of
from flower_geo.evaluation.instructions import evaluate_instructions, exact_match

__all__ = ["instruction_figures"]

#: Longest answer that is written out to be compared.
EXACT_MATCH_TOKENS = 32


def instruction_figures(
    model: nn.Module,
    tokenizer: Any,
    data: InstructionCorpus,
    *,
    batch_size: int,
    max_tokens: int | None = None,
    answers: int = 0,
) -> dict[str, float]:
    """Figures of the held-out part; nothing of the model changes.

    Args:
        model: a causal language model of transformers, or a PEFT model.
        tokenizer: the one that belongs to it.
        data: tokenised by it.
        batch_size: examples a forward pass.
        max_tokens: look at about that many labels; None = all.
        answers: short answers to have written out and compared, the first ones.

    Returns:
        ``loss`` in nats a token, ``accuracy`` (share of tokens held for the likeliest),
        ``eval-tokens`` both were taken on; where answers were asked for and the data
        has some, ``exact-match`` (share answered word for word) and ``exact-asked``.

    Raises:
        DataError: no held-out example has a label that counts.
    """
    pad = pad_id_of(tokenizer)
    found = evaluate_instructions(
        model, data.held_out, lambda rows: collate(rows, pad), batch_size, max_tokens=max_tokens
    )
    figures = {
        "loss": found.loss, "eval-tokens": float(found.tokens), "accuracy": found.accuracy,
    }  # fmt: skip
    asked = data.held_out_answers[:answers]
    if asked:
        hits, of = exact_match(
            model, tokenizer, [each.prompt_ids for each in asked],
            [each.answer for each in asked], max_new_tokens=EXACT_MATCH_TOKENS,
        )  # fmt: skip
        figures |= {"exact-match": hits / of, "exact-asked": float(of)}
    return figures
