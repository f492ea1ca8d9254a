"""What happens between two steps of a round: word to the onlooker, now and then a snapshot."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from torch import Tensor

from flower_geo.data import Cursor
from flower_geo.models import snapshot
from flower_geo.site.bench import Session
from flower_geo.site.inround import Pace, RoundSnapshot, RoundSnapshots
from flower_geo.site.watch import Leaving
from flower_geo.training import InnerLoop

__all__ = ["after_steps"]


def after_steps(
    session: Session,
    loop: InnerLoop,
    cursor: Cursor,
    snapshots: RoundSnapshots,
    metrics: Mapping[str, float],
    total: int | None,
) -> Callable[[int, Tensor], None]:
    """What to call after each step.

    Args:
        session: the request being served.
        loop: at work.
        cursor: of the data it takes.
        snapshots: of what it does.
        metrics: measured before the first step.
        total: steps in all; None where time ends them.

    Returns:
        A function that raises ``Leaving``, with a snapshot stored, when the site is to end.
    """
    config, watch, together = session.config, session.watch, session.task.together
    size = 3 * sum(parameter.nbytes for parameter in session.task.model.parameters())
    pace = Pace(config.snapshot_steps, size)

    def after_step(step: int, loss: Tensor) -> None:
        watch.step(step, total, loss)
        if step == total and not together:  # what comes next is the round's own result
            return
        leaving = watch.leaving()
        # Parties to one round keep the same steps, and the last one too: after it, nobody
        # takes another's steps again.
        every = config.snapshot_steps
        due = step == total or (every and step % every == 0) if together else pace.due(step)
        if leaving or due:
            began = time.monotonic()
            stored = snapshots.save(
                RoundSnapshot(
                    loop.so_far(), cursor.consumed, snapshot(loop.model), loop.state_dict(),
                    dict(metrics),
                )
            )  # fmt: skip
            pace.wrote(began)
            if stored:
                watch.stored(step)
        if leaving and step != total:
            raise Leaving

    return after_step
