"""The states of parts as the state of the whole model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from flower_geo.errors import ModelError
from flower_geo.models.state import listed

__all__ = ["merge_states"]


def merge_states(
    *states: Mapping[str, Tensor], names: Iterable[str] | None = None
) -> dict[str, Tensor]:
    """The union of the states of parts, as ``trained_state`` and its kin give them.

    Args:
        *states: of parts of one model.  What two of them hold (tied embeddings
            on both sides) must be equal to the bit.
        names: of the whole model's state, in its order; None = take what there is.

    Returns:
        The tensors themselves, not copies, in the order of ``names``.

    Raises:
        ModelError: two states differ in a tensor, or together they lack a name
            or hold an unknown one.
    """
    merged: dict[str, Tensor] = {}
    differing: list[str] = []
    for state in states:
        for name, tensor in state.items():
            other = merged.setdefault(name, tensor)
            if other is not tensor and not _same(other, tensor):
                differing.append(name)
    wanted = list(merged) if names is None else list(names)
    known = set(wanted)
    faults = [
        *listed("differ in", differing),
        *listed("lack", [name for name in wanted if name not in merged]),
        *listed("hold unknown", [name for name in merged if name not in known]),
    ]
    if faults:
        raise ModelError(
            f"the parts' states do not make one model: they {' and '.join(faults)}; "
            "merge all parts of one model, cut at the same layers, of the same step"
        )
    return {name: merged[name] for name in wanted}


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
