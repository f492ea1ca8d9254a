"""What the federated model is compared with at a site: the base, and the site on its own.

On its own a site takes the steps of each of its rounds again, on the same examples
in the same order and at the same places of the schedule, from the same beginning;
but what it goes on from is its own work only.  That lies in the generation of the
round, so that it follows the rounds that count, through restarts and resumed runs.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flower_geo.data import Cursor
from flower_geo.errors import TrainingError
from flower_geo.models import load_state
from flower_geo.site.bench import Session, seed_of
from flower_geo.site.inround import RoundSnapshots
from flower_geo.site.state import Generation
from flower_geo.site.steps import after_steps
from flower_geo.site.tasks.base import Comparison

__all__ = ["compared", "is_due", "train_alone"]

logger = logging.getLogger(__name__)

#: A generation's word on what lies in it: all steps so far, or nothing any more.
_FIELD, _TRAINED, _LOST = "alone", "trained", "lost"
_WEIGHTS, _INNER = "weights/", "inner/"


def is_due(session: Session, generation: Generation) -> bool:
    """Whether the site is still to take the generation's round on its own."""
    comparison = session.task.comparison
    wanted = comparison is not None and comparison.trains_alone
    return wanted and _FIELD not in generation.fields


def train_alone(
    session: Session, before: Generation, after: Generation, snapshots: RoundSnapshots
) -> None:
    """Take the round of ``after`` on the site's own, from ``before``, and note it in ``after``.

    Args:
        session: the request being served.
        before: the generation that ``after`` went on from.
        after: trained, with its metrics.
        snapshots: for these steps only.

    Raises:
        Leaving: the site is to end; asked again, it goes on from a snapshot.
    """
    comparison = session.task.comparison
    assert comparison is not None
    began = time.perf_counter()
    if before.round and before.fields.get(_FIELD) != _TRAINED:
        logger.warning(
            "site %s: what it had trained alone by round %d is gone; no local-only figures",
            session.site, before.round,
        )  # fmt: skip
        after.fields[_FIELD] = _LOST
        return
    try:
        after.alone = _trained(session, comparison, before, after, snapshots)
        after.fields[_FIELD] = _TRAINED
    except TrainingError as error:  # the federation has nothing to do with it
        logger.warning("site %s cannot train alone: %s", session.site, error)
        after.fields[_FIELD] = _LOST
    # The time of a round is measured by its ends; these seconds were no transfer.
    after.fields["metrics"]["seconds-total"] += time.perf_counter() - began


def _trained(
    session: Session,
    comparison: Comparison,
    before: Generation,
    after: Generation,
    snapshots: RoundSnapshots,
) -> dict[str, Tensor]:
    request, config, task = session.request, session.config, session.task
    comparison.load(_part(before.alone, _WEIGHTS), request.round)
    torch.manual_seed(seed_of(config.seed, session.site, request.round))
    loop = comparison.loop()
    found, inner = snapshots.load(), _part(before.alone, _INNER)
    if found is not None:
        load_state(task.model, found.weights)
        loop.load_state_dict(found.inner)
    elif inner and config.keep_optimizer:
        loop.load_state_dict(inner)
    consumed = found.consumed if found is not None else before.consumed
    cursor = Cursor(task.sequences, config.seed, consumed=consumed)
    steps = int(after.fields["metrics"]["steps"])
    session.watch.phase("training")
    loop.run(
        task.batches(cursor), steps=steps, position=request.position, span=request.span,
        on_step=after_steps(session, loop, cursor, snapshots, {}, steps),
        carried=found.so_far if found is not None else None,
    )  # fmt: skip
    state = {_WEIGHTS + name: tensor for name, tensor in comparison.state().items()}
    if config.keep_optimizer:
        state |= {_INNER + name: tensor for name, tensor in loop.state_dict().items()}
    return state


def compared(session: Session, newest: Callable[[], Generation]) -> dict[str, float]:
    """Held-out figures of the base and of the site alone: ``loss-base``, ``loss-local``, ...

    Args:
        session: the request being served.
        newest: gives the generation whose training alone is meant.
    """
    comparison = session.task.comparison
    if comparison is None:
        return {}
    comparison.load({}, 1)
    figures = session.held_out("base")
    if comparison.trains_alone:
        generation = newest()
        if generation.fields.get(_FIELD) == _TRAINED:
            comparison.load(_part(generation.alone, _WEIGHTS), generation.round)
            figures |= session.held_out("local")
    del figures["eval-tokens"]
    # A site alone may diverge; a reply of such numbers would be refused as a whole.
    return {name: value for name, value in figures.items() if math.isfinite(value)}


def _part(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in state.items()
        if name.startswith(prefix)
    }
