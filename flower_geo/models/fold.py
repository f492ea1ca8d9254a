"""Low-rank changes of the frozen base: put into a live model, or merged into a copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flower_geo.errors import ModelError
from flower_geo.models.adapter import (
    ADAPTER,
    check_adapter_state,
    factors_of,
    lora_layers,
)
from flower_geo.models.adapter_spec import module_name
from flower_geo.models.adapter_targets import is_linear, is_transposed, shared_with
from flower_geo.models.state import listed

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["Factors", "fold", "is_quantised", "merged_state"]

#: (B [out, r], A [r, in]) by a module's name in the base model.
Factors = Mapping[str, tuple[Tensor, Tensor]]


@torch.no_grad()
def fold(model: nn.Module, changes: Factors) -> None:
    """Add B @ A to the weights of the base, in place and in fp32 (scale 1).

    The adapter that may sit on the model is not touched.  A bf16 or fp16 base
    takes the sum rounded to its own format.

    Args:
        model: the base model, with or without an adapter on it.
        changes: by the module's name in the base model, or in PEFT's keys;
            nothing is written unless everything fits.

    Raises:
        ModelError: a module is unknown, is not linear, is quantised or shares its
            weight, or factors do not fit it or are not finite.
    """
    layers = _base_layers(model)
    wanted = {module_name(name): factors for name, factors in changes.items()}
    unknown = listed("the model has no", [name for name in wanted if name not in layers])
    if unknown:
        raise ModelError(f"cannot fold into the base: {unknown[0]}; use the run's own base model")
    for name, (b, a) in wanted.items():
        _check(name, layers, b, a)
    for name, (b, a) in wanted.items():
        weight = layers[name].weight
        assert isinstance(weight, Tensor)
        weight.copy_(_plus(weight, [(b, a, 1.0)], is_transposed(layers[name])))


def _check(name: str, layers: Mapping[str, nn.Module], b: Tensor, a: Tensor) -> None:
    layer = layers[name]
    weight = layer._parameters.get("weight")
    if weight is None or not is_linear(layer):
        raise ModelError(f"cannot fold into {name}, a {type(layer).__name__}; name linear layers")
    if is_quantised(layer):
        raise ModelError(
            f"cannot fold into {name}: its quantised weight holds no small change exactly; "
            "load the base with quantise=none, or aggregate by svd, ffa or alternate"
        )
    shared = shared_with(layers, name)
    if shared:
        raise ModelError(f"cannot fold into {name}: it shares its weight with {shared[0]}")
    out_in = tuple(weight.shape[::-1] if is_transposed(layer) else weight.shape)
    if b.dim() != 2 or a.dim() != 2 or b.shape[1] != a.shape[0] or (len(b), a.shape[1]) != out_in:
        raise ModelError(
            f"cannot fold into {name} [{out_in[0]}, {out_in[1]}]: its factors are "
            f"B {tuple(b.shape)} and A {tuple(a.shape)}; use those of this base model"
        )
    if not (bool(b.isfinite().all()) and bool(a.isfinite().all())):
        raise ModelError(f"cannot fold into {name}: its factors hold NaN or infinity")


def merged_state(
    model: PeftModel, state: Mapping[str, Tensor], folds: Factors | None = None
) -> dict[str, Tensor]:
    """The base with the adapter ``state`` and ``folds`` merged in, under the base's own names.

    W + Σ fold B @ A + s·B @ A in fp32; the model itself is not touched.  Tensors
    that no change meets share storage with the model, and so do tied ones with
    each other.

    Raises:
        ModelError: ``state`` or ``folds`` does not fit, or the base is quantised.
    """
    from peft.utils.save_and_load import get_base_model_state_dict

    check_adapter_state(model, state, any_rank=True)
    layers, adapted = _base_layers(model), lora_layers(model)
    factors, whole = factors_of(state)
    changes: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    for name, (b, a) in (folds or {}).items():
        name = module_name(name)
        if name not in layers:
            raise ModelError(f"cannot fold into the base: it has no {name}")
        _check(name, layers, b, a)
        changes.setdefault(name, []).append((b, a, 1.0))
    for name, (b, a) in factors.items():
        _check(name, layers, b, a)
        changes.setdefault(name, []).append((b, a, adapted[name].scaling[ADAPTER]))
    base: dict[str, Tensor] = get_base_model_state_dict(model)
    replaced: dict[int, Tensor] = {}
    for name, parts in changes.items():
        weight = base[f"{name}.weight"]
        base[f"{name}.weight"] = _plus(weight, parts, is_transposed(layers[name]))
    for name, tensor in whole.items():
        fresh = tensor.detach().to("cpu", torch.float32).clone()
        replaced[base[name].data_ptr()] = fresh
        base[name] = fresh
    # Another name of a tied tensor: its storage in the base is the replaced one's.
    return {name: replaced.get(tensor.data_ptr(), tensor) for name, tensor in base.items()}


def _plus(weight: Tensor, parts: list[tuple[Tensor, Tensor, float]], transposed: bool) -> Tensor:
    """The weight plus scale·B @ A for each part, summed in fp32; the weight's own format."""
    total = weight.detach().to(torch.float32, copy=True)
    for b, a, scale in parts:
        b, a = (factor.to(total.device, torch.float32) for factor in (b, a))
        left, right = (a.T, b.T) if transposed else (b, a)
        total.addmm_(left, right, alpha=scale)
    return total.to(weight.dtype)


def is_quantised(layer: nn.Module) -> bool:
    """Whether a layer's weight is stored in fewer bits than a float's."""
    weight = layer._parameters.get("weight")
    return weight is not None and (
        not weight.is_floating_point() or type(weight).__name__ in ("Params4bit", "Int8Params")
    )


def _base_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by their names in the base; where an adapter sits, the layer beneath it."""
    layers: dict[str, Any] = {}
    for full, module in model.named_modules():
        if full.endswith(".base_layer"):
            continue
        layer: Any = module
        if hasattr(layer, "get_base_layer"):
            layer = layer.get_base_layer()
        layers[module_name(full)] = layer
    return layers
