"""What a federated adapter is compared with at a site: its base, and the site alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from flower_geo.models import adapter_state, load_adapter_state
from flower_geo.training import InnerLoop

if TYPE_CHECKING:
    from flower_geo.site.tasks.adapters import Adapters

__all__ = ["AdapterComparison"]


class AdapterComparison:
    """See ``tasks.base.Comparison``.

    Alone, a site trains what its rule trains, at its own rank and scale, on the base as
    it is on disk; with no pull of FedProx, since there is no one to be pulled to.

    Args:
        task: the site's.
    """

    def __init__(self, task: Adapters) -> None:
        self._task = task
        self.trains_alone = task.config.local_baseline

    def load(self, state: Mapping[str, Tensor], round: int) -> None:
        """Put an adapter of the site's own into the model; an empty one is the fresh one."""
        self._task.load(self._task.initial(), round, dict)
        if state:
            load_adapter_state(self._task.model, state)

    def state(self) -> dict[str, Tensor]:
        """The adapter as it is now, in this site's rank and scale."""
        return adapter_state(self._task.model)

    def loop(self) -> InnerLoop:
        """The task's loop without a proximal term."""
        return self._task.loop(prox_mu=0.0)
