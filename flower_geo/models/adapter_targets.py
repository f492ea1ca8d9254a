"""Where an adapter goes: from names and patterns to a model's modules, and PEFT's config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from flower_geo.errors import ModelError
from flower_geo.models.adapter_spec import AdapterSpec, matches

if TYPE_CHECKING:
    from peft import LoraConfig
    from transformers import PreTrainedModel

__all__ = ["is_linear", "is_transposed", "peft_config", "shared_with"]


def peft_config(model: PreTrainedModel, spec: AdapterSpec) -> LoraConfig:
    """PEFT's config for ``spec`` on ``model``, once all of it can be averaged and merged.

    Raises:
        ModelError: a name or pattern meets no module, a target is no linear layer
            or shares its weight with another module.
    """
    from peft import LoraConfig

    modules = dict(model.named_modules())
    targets = _targets(model, modules, spec)
    tied, to_save = _whole_modules(model, modules, spec)
    for kind, patterns in (("rank", spec.rank_pattern), ("alpha", spec.alpha_pattern)):
        for pattern in patterns:
            if not any(matches(pattern, name) for name in targets):
                raise ModelError(
                    f"LoRA {kind} pattern {pattern!r} meets no target module; "
                    f"use a name such as {next(iter(targets))}"
                )
    wanted = spec.targets()
    if wanted == "auto":
        wanted = _short(targets, modules)
    alpha: Any = spec.alpha
    alphas: Any = dict(spec.alpha_pattern)
    return LoraConfig(
        r=spec.rank,
        lora_alpha=alpha,
        lora_dropout=spec.dropout,
        target_modules=wanted,
        rank_pattern=dict(spec.rank_pattern),
        alpha_pattern=alphas,
        use_rslora=spec.rslora,
        modules_to_save=to_save or None,
        ensure_weight_tying=tied,
        fan_in_fan_out=any(is_transposed(module) for module in targets.values()),
        bias="none",
        task_type="CAUSAL_LM",
    )


def _short(targets: Mapping[str, nn.Module], modules: Mapping[str, nn.Module]) -> list[str]:
    """The last parts of the targets' names where they mean no other module, else the names."""
    ends = {name.rpartition(".")[2] for name in targets}
    met = [name for name in modules if name.rpartition(".")[2] in ends]
    return sorted(ends if len(met) == len(targets) else targets)


def _targets(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], spec: AdapterSpec
) -> dict[str, nn.Module]:
    """The modules the adapter sits on; refuses what no rule can average."""
    from peft.utils.other import match_target_against_key

    wanted = spec.targets()
    head = _head(model)
    if wanted == "auto":
        found = {n: m for n, m in modules.items() if is_linear(m) and m is not head}
    elif isinstance(wanted, str):
        found = {n: m for n, m in modules.items() if n and match_target_against_key(wanted, n)}
    else:
        ends = {end: [n for n in modules if n == end or n.endswith(f".{end}")] for end in wanted}
        absent = [end for end, names in ends.items() if not names]
        if absent:
            raise ModelError(
                f"the model has no module {' or '.join(absent)} to put LoRA on; "
                f"it has {_endings(modules)}"
            )
        found = {name: modules[name] for names in ends.values() for name in names}
    if not found:
        raise ModelError(
            f"LoRA target {spec.target_modules!r} meets no module; it has {_endings(modules)}"
        )
    for name, module in found.items():
        if not is_linear(module):
            raise ModelError(
                f"LoRA cannot sit on {name}, a {type(module).__name__}; name linear layers, and "
                "put an embedding into modules_to_save"
            )
        if shared_with(modules, name):
            raise ModelError(
                f"{name} shares its weight with {shared_with(modules, name)[0]}, so LoRA on it "
                "could not be merged; put it into modules_to_save instead"
            )
    kinds = {is_transposed(module) for module in found.values()}
    if len(kinds) > 1:
        raise ModelError("LoRA on Conv1D and Linear layers at once is not supported; name one kind")
    return found


def _whole_modules(
    model: PreTrainedModel, modules: Mapping[str, nn.Module], spec: AdapterSpec
) -> tuple[bool, list[str]]:
    """Whether trained embeddings must stay tied, and PEFT's ``modules_to_save``."""
    asked = list(spec.modules_to_save)
    for name in asked:
        if not any(own == name or own.endswith(f".{name}") for own in modules):
            raise ModelError(f"the model has no module {name} to train whole; mend modules_to_save")
    names = {id(module): name for name, module in modules.items()}
    embedding = names[id(model.get_input_embeddings())]
    head = names.get(id(_head(model)), "")
    ends = {own for own in (embedding, head) for n in asked if own == n or own.endswith(f".{n}")}
    if not ends or embedding not in [*shared_with(modules, head)]:
        return False, asked
    # PEFT ties by the output layer's name only: GPT-2's "wte" is none it knows.
    rest = [n for n in asked if not any(own == n or own.endswith(f".{n}") for own in ends)]
    return True, [*rest, head]


def _head(model: PreTrainedModel) -> nn.Module | None:
    untyped: Any = model
    head: nn.Module | None = untyped.get_output_embeddings()
    return head


def shared_with(modules: Mapping[str, nn.Module], name: str) -> list[str]:
    """Names of other modules that hold the very weight of module ``name``."""
    weight = getattr(modules.get(name), "weight", None)
    if weight is None:
        return []
    return [
        other
        for other, module in modules.items()
        if other != name and module._parameters.get("weight") is weight
    ]


def is_linear(module: nn.Module) -> bool:
    """Whether LoRA factors of a module are plain matrices (Linear, quantised or not, Conv1D)."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Whether the weight is [in, out], as in GPT-2's ``Conv1D``."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def _endings(modules: Mapping[str, nn.Module]) -> str:
    return ", ".join(sorted({n.rpartition(".")[2] for n, m in modules.items() if is_linear(m)}))
