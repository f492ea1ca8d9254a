"""A second body for the containers of a model, around the very same layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Bypass", "NoPositions", "shell"]

#: What ``nn.Module`` keeps in dicts and sets of its own, each to be copied.
_PER_MODULE = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


class Bypass(nn.Module):
    """Gives its first input back: stands where another part has the module."""

    def forward(self, hidden: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Return ``hidden`` itself, whatever else a layer would have been given."""
        return hidden


class NoPositions(nn.Module):
    """Position embeddings that add nothing: for hidden states which have them already."""

    def forward(self, position_ids: Tensor) -> Tensor:
        """-0.0, a scalar: x + -0.0 has the bits of x, also where x is -0.0 or 0.0."""
        return torch.tensor(-0.0, device=position_ids.device)


def shell(model: nn.Module, path: Sequence[str], swaps: Mapping[str, nn.Module]) -> nn.Module:
    """Copy ``model`` without copying anything it computes with, and swap modules of the copy.

    The containers along ``path`` and those that hold a swapped module are made
    anew; all other modules, parameters and buffers are shared with ``model``,
    which stays as it is.  The copy holds no reference to a container of
    ``model`` nor to a module that was swapped.

    Args:
        model: the root.
        path: dotted names of containers to be made anew, parents first; the root is "".
        swaps: modules by dotted name, put in place of the root's.  The parent of
            each must be in ``path``.
    """
    made: dict[str, nn.Module] = {}
    old: dict[int, nn.Module] = {}
    for name in path:
        source = model.get_submodule(name) if name else model
        made[name] = old[id(source)] = _shallow(source)
        if name:
            parent, _, child = name.rpartition(".")
            made[parent]._modules[child] = made[name]
    for name, module in swaps.items():
        parent, _, child = name.rpartition(".")
        made[parent]._modules[child] = module
    for copied in made.values():
        _rebind(copied, old)
    return made[""]


def _shallow(module: nn.Module) -> nn.Module:
    copied: nn.Module = type(module).__new__(type(module))
    values: dict[str, Any] = dict(module.__dict__)
    for name, value in module.__dict__.items():
        # Hooks too: one that is put on the copy must not fire in the original.
        if name in _PER_MODULE or (name.endswith("_hooks") and isinstance(value, dict)):
            values[name] = value.copy()
    copied.__dict__.update(values)
    return copied


def _rebind(module: nn.Module, old: Mapping[int, nn.Module]) -> None:
    """Point methods that an object keeps (PEFT does so) from the old containers to the new."""
    for name, value in module.__dict__.items():
        if isinstance(value, MethodType) and id(value.__self__) in old:
            module.__dict__[name] = MethodType(value.__func__, old[id(value.__self__)])
