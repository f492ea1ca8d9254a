"""Batches of a step, and the logits and the loss where their labels count.

A batch is a ``LongTensor[batch, seq_len]`` of token ids, every one after the
first of a row to be predicted, or a mapping: ``input_ids`` and ``labels``
``[batch, n]`` with :data:`IGNORED` where nothing is to be learned,
``attention_mask`` of that shape, and ``position_ids`` where several texts lie
in one row.  Label i is what is to be predicted from the tokens before i, so
the first label of a row never counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_geo.data.instructions import IGNORED
from flower_geo.errors import DataError

__all__ = [
    "IGNORED",
    "Batch",
    "Counted",
    "counted",
    "counted_logits",
    "head_sees",
    "model_inputs",
    "picked",
]

Batch = Tensor | Mapping[str, Tensor]


@dataclass(frozen=True)
class Counted:
    """Where a batch's labels count.

    Attributes:
        where: ``LongTensor[m]``, index into the flattened ``[batch, n]`` positions
            whose next token is to be predicted.
        targets: ``LongTensor[m]``, those next tokens.
    """

    where: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.targets.numel()


def counted(batch: Mapping[str, Tensor]) -> Counted:
    """Where the labels of a batch count.  Costs a wait where they lie on a GPU.

    Raises:
        DataError: ids or labels are missing, or not of one shape ``[batch, n]``.
    """
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or ids.ndim != 2 or ids.shape != labels.shape:
        found = {name: tuple(tensor.shape) for name, tensor in batch.items()}
        raise DataError(
            f"a batch needs input_ids and labels of one shape [batch, n], not {found}; "
            "collate the examples with flower_geo.data"
        )
    following = functional.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
    where = (following != IGNORED).nonzero().flatten()
    return Counted(where, following[where])


def model_inputs(batch: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """What the model is called with, without labels, on ``device``.

    Packed rows go without a mask: transformers keeps their texts apart by the
    position ids only where no mask is given.  So does padding on the right,
    which no earlier token sees: attention without a mask is faster.
    """
    inputs = {"input_ids": batch["input_ids"]}
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if positions is not None:
        inputs["position_ids"] = positions
    elif mask is not None and (mask.is_cuda or bool((mask[:, :-1] < mask[:, 1:]).any())):
        inputs["attention_mask"] = mask
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def counted_logits(
    model: nn.Module, batch: Mapping[str, Tensor], places: Counted, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Logits ``[m, vocab]`` (fp32) and targets ``[m]`` at the labels that count.

    The output head, which for a small model is most of the work, sees these
    positions only: they are picked out on the way into it.  What the model does
    to its logits afterwards (scales, caps) happens as always.

    Args:
        model: a causal model of transformers, or a PEFT model around one.
        batch: a mapping.
        places: of the same batch; at least one.
        device: of the model.
    """
    inputs = model_inputs(batch, device)
    shape, where = inputs["input_ids"].shape, places.where.to(device, non_blocking=True)
    with head_sees(model, shape, where):
        logits = model(**inputs, use_cache=False).logits
    return picked(logits, shape, where), places.targets.to(device, non_blocking=True)


@contextmanager
def head_sees(model: nn.Module, shape: Sequence[int], where: Tensor) -> Iterator[None]:
    """Let the output head see some positions only, picked out on the way into it.

    Args:
        model: one with ``get_output_embeddings``; any other stays as it is.
        shape: (batch, n) of the forward.
        where: ``LongTensor[m]``, index into the flattened positions, on the model's device.
    """

    def pick(_: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not arguments or arguments[0].shape[:2] != torch.Size(shape):
            return None
        return (arguments[0].flatten(0, 1).index_select(0, where)[None], *arguments[1:])

    head = getattr(model, "get_output_embeddings", lambda: None)()
    hook = head.register_forward_pre_hook(pick) if isinstance(head, nn.Module) else None
    try:
        yield
    finally:
        if hook is not None:
            hook.remove()


def picked(logits: Tensor, shape: Sequence[int], where: Tensor) -> Tensor:
    """Logits ``[m, vocab]`` (fp32) of what a model gave under :func:`head_sees`."""
    if logits.shape[:2] == torch.Size(shape):  # the model has no head of its own to hook into
        logits = logits.flatten(0, 1).index_select(0, where)[None]
    return logits[0].float()
