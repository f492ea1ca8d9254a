"""DiLoCo: long local training, one Nesterov step on the mean of what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from flower_geo.aggregation import Contribution, OuterSGD, weighted_mean
from flower_geo.config import DiLoCoConfig, parse
from flower_geo.strategies.base import GeoStrategy

__all__ = ["DiLoCo"]


class DiLoCo(GeoStrategy):
    """DiLoCo pretraining (arXiv:2311.08105).

    Sent down: the model, as differences under a lossy codec.  Sent up: the
    pseudo-gradient ``base - local`` after H local AdamW steps; the inner
    optimizer stays at the site.  The next model is an outer SGD step with
    Nesterov momentum on the token-weighted mean.

    Args:
        config: a checked configuration; by default made from ``options``.
        options: configuration keys in Python spelling (``outer_lr=0.9``).

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    def __init__(self, config: DiLoCoConfig | None = None, **options: Any) -> None:
        if config is None:
            config = parse(
                DiLoCoConfig, {name.replace("_", "-"): value for name, value in options.items()}
            )
        super().__init__(config)
        self.outer = OuterSGD(config.outer_lr, config.outer_momentum, config.outer_nesterov)
        self._momentum: dict[str, Tensor] = {}

    def next_model(
        self,
        master: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        replies: Sequence[Contribution],
    ) -> dict[str, Tensor]:
        """Return the model after one outer step."""
        following: dict[str, Tensor] = {}
        momentum: dict[str, Tensor] = {}
        for name, mean in weighted_mean(base, replies):
            following[name], velocity = self.outer.step(
                master[name], base[name], mean, self._momentum.get(name)
            )
            if velocity is not None:
                momentum[name] = velocity
        self._momentum = momentum
        return following

    def outer_state(self) -> dict[str, Tensor]:
        """Momentum by tensor name, fp32; empty before the first round."""
        return dict(self._momentum)

    def load_outer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`outer_state` gave."""
        self._momentum = dict(state)
