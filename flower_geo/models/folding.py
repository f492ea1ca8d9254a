"""The frozen base under factors that were folded into it, from version to version.

Folded factors have a key of their own each (a round and a module, say), and come and
go: a site may be brought forward, back, or to factors put together anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flower_geo.models.adapter import lora_layers
from flower_geo.models.adapter_spec import module_name
from flower_geo.models.fold import fold

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["FoldedBase"]


class FoldedBase:
    """A live base model and what it holds beside its own weights.

    Args:
        model: an adapter on its base, which is changed in place.
    """

    def __init__(self, model: PeftModel) -> None:
        self.model = model
        self._layers = lora_layers(model)
        self._held: dict[str, tuple[str, Tensor, Tensor]] = {}
        self._own: dict[str, Tensor] = {}

    def hold(self, folds: Mapping[str, tuple[str, Tensor, Tensor]]) -> None:
        """Let the base hold exactly these ``(module, B, A)``, of scale 1, by key.

        What it holds already is not added again; where something is to go, the own
        weights are put back first, so that the sum does not depend on the way there
        but in its order: keys are added sorted.

        Raises:
            ModelError: as ``fold``.
        """
        new = sorted(folds.keys() - self._held.keys())
        kept = all(key in folds and _equal(was, folds[key]) for key, was in self._held.items())
        if not kept or (new and self._held and new[0] < max(self._held)):
            self._restore()
            new = sorted(folds)
        for key in new:
            module, b, a = folds[key]
            if module not in self._own:
                self._own[module] = self._weight(module).detach().clone()
            fold(self.model, {module: (b, a)})
            self._held[key] = folds[key]

    def _weight(self, module: str) -> Tensor:
        weight: Tensor = self._layers[module_name(module)].get_base_layer().weight
        return weight

    @torch.no_grad()
    def _restore(self) -> None:
        for module, weight in self._own.items():
            self._weight(module).copy_(weight)
        self._held.clear()


def _equal(one: tuple[str, Tensor, Tensor], other: tuple[str, Tensor, Tensor]) -> bool:
    return one[0] == other[0] and all(map(torch.equal, one[1:], other[1:]))
