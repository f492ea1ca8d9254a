"""A LoRA adapter on a model: put there, read, written, and which part of it trains.

An adapter's state is its tensors under the names PEFT saves them by:
``base_model.model.<module>.lora_A.weight`` [r, in], ``.lora_B.weight`` [out, r],
and ``base_model.model.<module>.<parameter>`` for modules trained whole.  A tensor
tied to several places is one entry.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flower_geo.errors import ModelError
from flower_geo.models.adapter_spec import PREFIX, AdapterSpec, module_name
from flower_geo.models.adapter_targets import peft_config
from flower_geo.models.build import apart_from_random, first_line, quiet
from flower_geo.models.state import listed

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = [
    "adapter_parameters",
    "adapter_state",
    "attach",
    "check_adapter_state",
    "factors_of",
    "initial_a",
    "load_adapter_state",
    "lora_keys",
    "lora_layers",
    "quiet_peft",
    "saved_parameters",
    "set_trained",
]

#: PEFT's name for a model's only adapter.
ADAPTER = "default"


def attach(model: PreTrainedModel, spec: AdapterSpec, seed: int) -> PeftModel:
    """Put a fresh LoRA adapter on ``model``, in place; its own weights are frozen.

    A is a function of ``seed``, the module's name and its input size alone, B is
    zero.  An adapter of rank r has the first r rows of one of any larger rank.
    The caller's random state is neither read nor changed.

    Args:
        model: a causal language model of linear layers (``nn.Linear``, its
            quantised forms, or GPT-2's ``Conv1D``).
        spec: the adapter's shape.
        seed: of A; equal at every site and at the coordinator.

    Raises:
        ModelError: a name or pattern meets no module, a target is no linear
            layer, or it shares its weight with another module.
    """
    from peft import PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        raise ModelError("the model has an adapter already; attach to a model built anew")
    config = peft_config(model, spec)
    try:
        with quiet_peft(), apart_from_random():
            peft: Any = get_peft_model(model, config, adapter_name=ADAPTER)
    except (ValueError, TypeError, UserWarning) as error:
        raise ModelError(
            f"no LoRA adapter can be put on this model: {first_line(error)}; "
            "use target_modules='auto' or names of its linear layers"
        ) from error
    for name, layer in lora_layers(peft).items():
        with torch.no_grad():
            a = initial_a(seed, name, layer.r[ADAPTER], layer.in_features)
            layer.lora_A[ADAPTER].weight.copy_(a)
            layer.lora_B[ADAPTER].weight.zero_()
    attached: PeftModel = peft
    return attached


def initial_a(seed: int, module: str, rank: int, in_features: int) -> Tensor:
    """A fresh A [rank, in_features], fp32: uniform in ±1/√in, as PEFT draws it.

    The first rows of a larger rank are the rows of a smaller one.
    """
    digest = hashlib.sha256(f"lora_A {seed} {module_name(module)}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    bound = 1 / math.sqrt(in_features)
    a = torch.empty(rank, in_features, dtype=torch.float32, device="cpu")
    for row in a:
        row.uniform_(-bound, bound, generator=generator)
    return a


def lora_layers(model: PeftModel) -> dict[str, Any]:
    """PEFT's layers that hold the factors, by the module's name in the base model."""
    from peft.tuners.lora import LoraLayer

    return {
        module_name(name): module
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer) and ADAPTER in module.lora_A
    }


def adapter_parameters(model: PeftModel) -> dict[str, nn.Parameter]:
    """The live parameters of the adapter under PEFT's saved names, a tied one once."""
    own: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in saved_parameters(model).items():
        own.setdefault(id(parameter), (name, parameter))
    return dict(own.values())


def saved_parameters(model: PeftModel) -> dict[str, nn.Parameter]:
    """Like :func:`adapter_parameters`, a tied one under each of its names."""
    from peft import get_peft_model_state_dict

    everything: Any = dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, nn.Parameter] = get_peft_model_state_dict(
        model, state_dict=everything, adapter_name=ADAPTER, save_embedding_layers=False
    )
    return found


def adapter_state(model: PeftModel) -> dict[str, Tensor]:
    """Contiguous fp32 CPU copies of the adapter, under PEFT's saved names."""
    return {
        name: parameter.detach().to(
            "cpu", torch.float32, copy=True, memory_format=torch.contiguous_format
        )
        for name, parameter in adapter_parameters(model).items()
    }


@torch.no_grad()
def load_adapter_state(model: PeftModel, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the adapter, in place; nothing is written unless everything fits.

    Raises:
        ModelError: names are missing or unknown, or a shape differs.
    """
    check_adapter_state(model, state)
    for name, parameter in adapter_parameters(model).items():
        parameter.copy_(state[name])


def check_adapter_state(
    model: PeftModel, state: Mapping[str, Tensor], *, any_rank: bool = False
) -> None:
    """Raise ``ModelError`` unless ``state`` has the adapter's names and shapes.

    Args:
        model: the model the state is for.
        state: as :func:`adapter_state` gives it.
        any_rank: let the factors' rank differ from the model's.
    """
    own = adapter_parameters(model)
    wrong = [
        f"{name} ({tuple(state[name].shape)}, not {tuple(parameter.shape)})"
        for name, parameter in own.items()
        if name in state and not _fits(name, state[name], parameter, any_rank)
    ]
    faults = [
        *listed("lacks", [name for name in own if name not in state]),
        *listed("holds unknown", [str(name) for name in state if name not in own]),
        *listed("has other shapes at", wrong),
    ]
    if faults:
        raise ModelError(
            f"this adapter does not fit the model's: it {' and '.join(faults)}; use the same base "
            "model, target modules, rank and modules_to_save on both sides"
        )


def _fits(name: str, tensor: Tensor, parameter: nn.Parameter, any_rank: bool) -> bool:
    if not any_rank or not name.endswith((".lora_A.weight", ".lora_B.weight")):
        return tensor.shape == parameter.shape
    kept = 1 if name.endswith(".lora_A.weight") else 0
    return tensor.dim() == 2 and tensor.shape[kept] == parameter.shape[kept]


def set_trained(model: PeftModel, predicate: Callable[[str], bool]) -> list[str]:
    """Let exactly those tensors of the adapter train whose saved name ``predicate`` accepts.

    The base stays frozen.  What is frozen loses its gradient, so that no
    optimizer moves it.

    Returns:
        The names that train, in the model's order.

    Raises:
        ModelError: nothing would train.
    """
    own = adapter_parameters(model)
    chosen = [name for name in own if predicate(name)]
    if not chosen:
        raise ModelError(
            f"none of the adapter's {len(own)} tensors would be trained; "
            "mend the pattern that chooses them"
        )
    wanted = set(chosen)
    for name, parameter in own.items():
        parameter.requires_grad_(name in wanted)
        if name not in wanted:
            parameter.grad = None
    return chosen


def lora_keys(module: str) -> tuple[str, str]:
    """The saved names of a module's A and B."""
    stem = f"{PREFIX}{module_name(module)}"
    return f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"


def factors_of(
    state: Mapping[str, Tensor],
) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """An adapter state as its factors and its whole tensors.

    Returns:
        (B [out, r], A [r, in]) by the module's name in the base model, and
        tensors trained whole by the parameter's name in the base model.

    Raises:
        ModelError: an A has no B, or the reverse.
    """
    factors: dict[str, tuple[Tensor, Tensor]] = {}
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        stem, found, _ = name.rpartition(".lora_A.weight")
        if found:
            partner = state.get(f"{stem}.lora_B.weight")
            if partner is None or partner.shape[1:] != tensor.shape[:1]:
                raise ModelError(f"{name} has no lora_B of its rank; use a whole adapter")
            factors[module_name(stem)] = (partner, tensor)
        elif name.endswith(".lora_B.weight"):
            if f"{name.removesuffix('.lora_B.weight')}.lora_A.weight" not in state:
                raise ModelError(f"{name} has no lora_A; use a whole adapter")
        else:
            whole[module_name(name)] = tensor
    return factors, whole


@contextmanager
def quiet_peft() -> Iterator[None]:
    """Keep the notes of PEFT and transformers about each other off the terminal.

    A warning of PEFT about the adapter itself becomes an error: it says that the
    model would not be what was asked for.
    """
    with quiet(), warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning, module="peft")
        warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
        warnings.filterwarnings("ignore", category=FutureWarning, module="peft")
        yield
