"""Examples of unequal length as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flower_geo.data.instructions.corpus import IGNORED, Example
from flower_geo.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

__all__ = ["collate", "pad_id_of"]


def pad_id_of(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id to pad with: the tokenizer's own, else its end-of-text id, else 0.

    Which one it is never matters to what is learnt: `collate` masks by place, not
    by id.
    """
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if isinstance(token, int):
            return token
    return 0


def collate(examples: Sequence[Example], pad_id: int) -> dict[str, Tensor]:
    """Pad examples on the right to the longest of them.

    Padding is known by its place, so a pad id that is also the end-of-text id, or
    an ordinary token, leaves the real ones of that id trained on.

    Args:
        examples: at least one; all packed, or none.
        pad_id: id to fill with.

    Returns:
        LongTensors [batch, n]: "input_ids", "labels" (-100 on padding), and
        "attention_mask" (0 on padding).

        For packed rows "position_ids" stands in the mask's place, 0 on padding.
        `transformers` keeps the conversations of a row apart by where positions
        restart, but only in a call without an attention mask and with
        ``use_cache=False``: with either, they see each other.  That holds for eager
        and SDPA attention at any batch size, for flash attention at one row a batch.

    Raises:
        DataError: there is no example, or packed and other ones are mixed.
    """
    import torch

    if not examples:
        raise DataError("a batch of no examples: give at least one")
    packed = examples[0].position_ids is not None
    if any((example.position_ids is not None) != packed for example in examples):
        raise DataError("packed and other examples in one batch: give one kind")
    size = max(example.input_ids.numel() for example in examples)
    shape = (len(examples), size)
    batch = {
        "input_ids": torch.full(shape, pad_id, dtype=torch.long),
        "labels": torch.full(shape, IGNORED, dtype=torch.long),
        "position_ids" if packed else "attention_mask": torch.zeros(shape, dtype=torch.long),
    }
    for row, example in enumerate(examples):
        n = example.input_ids.numel()
        batch["input_ids"][row, :n] = example.input_ids
        batch["labels"][row, :n] = example.labels
        if example.position_ids is not None:
            batch["position_ids"][row, :n] = example.position_ids
        else:
            batch["attention_mask"][row, :n] = 1
    return batch
