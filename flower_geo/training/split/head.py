"""A forward through the part with the head, where the labels count."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from flower_geo.evaluation.batch import Counted, head_sees, picked
from flower_geo.models.split import SplitPart

__all__ = ["logits_of", "weighted"]


def logits_of(
    part: SplitPart, hidden: Tensor, inputs: Mapping[str, Tensor], places: Counted
) -> tuple[Tensor, Tensor]:
    """Logits [m, vocab] (fp32) and targets [m] of the part with the head.

    Args:
        part: the last one.
        hidden: states [b, n, d] from the part below.
        inputs: attention_mask and position_ids, where the whole model gets them.
        places: where labels count; at least one.
    """
    where = places.where.to(hidden.device)
    shape = hidden.shape[:2]
    with head_sees(part.model, shape, where):
        logits = part.run(hidden, inputs.get("attention_mask"), inputs.get("position_ids"))
    return picked(logits, shape, where), places.targets.to(hidden.device)


def weighted(loss: Tensor, count: int, total: int) -> Tensor:
    """A micro-batch's mean loss as its share of the step's mean."""
    return loss if count == total else loss * (count / total)
