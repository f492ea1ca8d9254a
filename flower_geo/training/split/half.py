"""What a cloud half trains: parameters, an optimizer, and steps on summed gradients."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flower_geo.errors import TrainingError
from flower_geo.evaluation.precision import device_of
from flower_geo.models.split import SplitPart
from flower_geo.training.optimizer import adopted, flat_state, load_flat_state
from flower_geo.training.schedule import InnerConfig

__all__ = ["Half", "mean_of"]

_WEIGHT = "weight/"


class Half:
    """Trained parameters of a part with their optimizer.

    Several halves may stand on one part: each then has weights of its own, which
    are put into the part while the half is at work.

    Args:
        part: whose parameters that require a gradient are trained.
        config: of the inner loop.
        own: keep weights apart from the part's.
    """

    def __init__(self, part: SplitPart, config: InnerConfig, *, own: bool = False) -> None:
        self.part = part
        self.config = config
        self._own = own
        self._device = device_of(part)
        self._fused = self._device.type == "cuda"
        self.parameters, self._optimizer = adopted(part, config, {}, None, fused=self._fused)
        self._values: dict[str, Tensor] = {}
        self.begin()

    def begin(self) -> None:
        """Take the part's weights as they are, and train what it says is to be trained."""
        self.parameters, self._optimizer = adopted(
            self.part, self.config, self.parameters, self._optimizer, fused=self._fused
        )
        if self._own:
            self._values = {name: p.detach().clone() for name, p in self.parameters.items()}

    @contextmanager
    def in_place(self, values: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """Let the part have this half's weights, or ``values`` in their stead."""
        wanted = self._values if values is None else values
        before = {name: self.parameters[name].data for name in wanted}
        for name, value in wanted.items():
            self.parameters[name].data = value
        try:
            yield
        finally:
            for name, value in before.items():
                self.parameters[name].data = value

    @contextmanager
    def gathering(self, gradients: dict[str, Tensor]) -> Iterator[None]:
        """Let backward passes add to ``gradients``; nothing stays on the parameters."""
        for name, parameter in self.parameters.items():
            parameter.grad = gradients.get(name)
        try:
            yield
        finally:
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    gradients[name] = parameter.grad
                parameter.grad = None

    def ordered(self, gradients: Mapping[str, Tensor]) -> list[Tensor]:
        """Gradients in the order of the part's parameters."""
        return [gradients[name] for name in self.parameters if name in gradients]

    def step(self, gradients: dict[str, Tensor], norm: Tensor, rate: float) -> None:
        """Take a step along ``gradients``, clipped as those of a whole model of that norm."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with self.in_place():
            for name, parameter in self.parameters.items():
                parameter.grad = gradients.get(name)
            try:
                if self.config.clip_norm:
                    nn.utils.clip_grads_with_norm_(
                        self.parameters.values(), self.config.clip_norm, norm
                    )
                self._optimizer.step()
            finally:
                self._optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """The live weights by the parameter's name."""
        return {
            name: self._values.get(name, parameter.detach())
            for name, parameter in self.parameters.items()
        }

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights in, in place.

        Raises:
            TrainingError: names or shapes differ.
        """
        own = self.weights()
        shapes = {name: tensor.shape for name, tensor in weights.items()}
        if shapes != {name: tensor.shape for name, tensor in own.items()}:
            raise TrainingError(
                "the saved cloud half does not fit this one: names or shapes of what is trained "
                "differ; use the state of the same model, cut and adapter"
            )
        for name, tensor in own.items():
            tensor.copy_(weights[name])

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer as CPU copies."""
        weights = {
            f"{_WEIGHT}{name}": tensor.to("cpu", copy=True).contiguous()
            for name, tensor in self.weights().items()
        }
        return weights | flat_state(self._optimizer, self.parameters)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state` gave; ``TrainingError`` where it does not fit."""
        weights = {k.removeprefix(_WEIGHT): v for k, v in state.items() if k.startswith(_WEIGHT)}
        moments = {k: v for k, v in state.items() if not k.startswith(_WEIGHT)}
        self.parameters, self._optimizer = adopted(
            self.part, self.config, self.parameters, self._optimizer,
            fused=self._fused, also=weights,
        )  # fmt: skip
        if self._own:
            missing = self.parameters.keys() - self._values.keys()
            self._values |= {name: self.parameters[name].detach().clone() for name in missing}
        self.load_weights(weights)
        load_flat_state(self._optimizer, self.parameters, moments)


def mean_of(
    parts: Sequence[tuple[int, Mapping[str, Tensor]]], names: Sequence[str]
) -> dict[str, Tensor]:
    """Sum over (weight, tensors) of tensors * weight / sum of weights, in the order given.

    One part alone, or the only one with a weight, comes out as it is, to the bit.
    """
    counting = [(weight, tensors) for weight, tensors in parts if weight]
    total = sum(weight for weight, _ in counting)
    if len(counting) == 1:
        return dict(counting[0][1])
    found: dict[str, Tensor] = {}
    for weight, tensors in counting:
        for name in names:
            if name not in tensors:
                continue
            share = tensors[name] * (weight / total)
            found[name] = found[name] + share if name in found else share
    return found
