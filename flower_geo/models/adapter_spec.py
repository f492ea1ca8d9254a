"""What a LoRA adapter is made of: ranks, scales and the modules it sits on."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from flower_geo.errors import ModelError

if TYPE_CHECKING:
    from peft import LoraConfig

__all__ = ["AdapterSpec", "matches", "module_name", "spec_from_config"]

#: What PEFT puts before a module's own name in every saved key.
PREFIX = "base_model.model."

#: LoraConfig fields a spec carries, and those that change nothing about the factors.
_CARRIED = {
    "r", "lora_alpha", "lora_dropout", "target_modules", "rank_pattern", "alpha_pattern",
    "use_rslora", "modules_to_save",
}  # fmt: skip
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "fan_in_fan_out",
    "inference_mode", "peft_type", "peft_version", "revision", "runtime_config", "task_type",
}  # fmt: skip

_NO_DORA = (
    "DoRA cannot be aggregated: it scales each row by a magnitude over the norm of W + s·B·A, "
    "which is not linear in its parts, so no rule gives the mean of the sites' models; "
    "train plain LoRA (use_dora=false)"
)


def module_name(key: str) -> str:
    """A module's name in the base model, from that name or from PEFT's with its prefix."""
    return key.removeprefix(PREFIX)


@dataclass(frozen=True)
class AdapterSpec:
    """The shape of a LoRA adapter, equal in meaning to PEFT's ``LoraConfig``.

    Attributes:
        rank: r, of the factors A [r, in] and B [out, r].
        alpha: α; the scale of B @ A is α/r, with ``rslora`` α/√r.
        dropout: probability, on the input of A while training.
        target_modules: "auto" = every linear layer of attention and MLP; or names
            (the ends of modules' full names), as a tuple or joined by commas; or,
            as PEFT takes it, a regular expression for the full name.
        rank_pattern: rank by module name or regular expression, where it differs.
        alpha_pattern: α the same way.
        rslora: scale by α/√r (rank-stabilised LoRA).
        modules_to_save: names of modules trained and sent whole, such as a
            resized embedding.

    Raises:
        ModelError: a value no adapter can have.
    """

    rank: int = 16
    alpha: float = 32
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "auto"
    rank_pattern: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    alpha_pattern: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    rslora: bool = False
    modules_to_save: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        ranks: dict[str, object] = {"rank": self.rank}
        ranks |= {f"rank of {name}": rank for name, rank in self.rank_pattern.items()}
        for name, rank in ranks.items():
            if type(rank) is not int or rank < 1:
                raise ModelError(f"LoRA {name} is {rank!r}; use a whole number from 1")
        alphas = {"alpha": self.alpha}
        alphas |= {f"alpha of {name}": alpha for name, alpha in self.alpha_pattern.items()}
        for name, alpha in alphas.items():
            if not math.isfinite(alpha) or alpha <= 0:
                raise ModelError(f"LoRA {name} is {alpha!r}; use a number above 0")
        if not 0 <= self.dropout < 1:
            raise ModelError(f"LoRA dropout is {self.dropout!r}; use 0 or more, and less than 1")
        if not self.target_modules:
            raise ModelError("LoRA has no target modules; name some, or use 'auto'")
        for pattern in (*self.rank_pattern, *self.alpha_pattern):
            try:
                re.compile(pattern)
            except re.error as error:
                raise ModelError(
                    f"LoRA pattern {pattern!r} is no regular expression: {error}; "
                    "use a module's name"
                ) from error

    def rank_of(self, module: str) -> int:
        """Rank of one module's factors, by its name in the base model or in PEFT's keys."""
        return int(_by_pattern(self.rank_pattern, module, self.rank))

    def alpha_of(self, module: str) -> float:
        """α of one module."""
        return float(_by_pattern(self.alpha_pattern, module, self.alpha))

    def scale_of(self, module: str) -> float:
        """What B @ A is multiplied by in one module: α/r, or α/√r with ``rslora``."""
        rank = self.rank_of(module)
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)

    def targets(self) -> str | list[str]:
        """``target_modules`` as PEFT takes it; "auto" stays "auto"."""
        if not isinstance(self.target_modules, str):
            return list(self.target_modules)
        if self.target_modules == "auto" or not re.fullmatch(r"[\w.,\s]+", self.target_modules):
            return self.target_modules
        return [name for name in re.split(r"[,\s]+", self.target_modules) if name]


def spec_from_config(config: LoraConfig) -> AdapterSpec:
    """The spec that equals a PEFT config.

    Raises:
        ModelError: the config asks for something a mean of factors cannot keep
            (DoRA, trained biases, initial values that change the base, ...).
    """
    from peft import LoraConfig

    if config.use_dora:
        raise ModelError(_NO_DORA)
    plain = LoraConfig()
    foreign = [
        item.name
        for item in dataclasses.fields(config)
        if item.name not in _CARRIED | _HARMLESS
        and getattr(config, item.name) != getattr(plain, item.name)
    ]
    if foreign:
        raise ModelError(
            f"an adapter with {', '.join(foreign)} cannot be aggregated exactly; "
            f"leave {'it' if len(foreign) == 1 else 'them'} at PEFT's default"
        )
    targets = config.target_modules
    if targets is None or targets == "all-linear":
        targets = "auto"
    return AdapterSpec(
        rank=config.r,
        alpha=config.lora_alpha,
        dropout=config.lora_dropout,
        target_modules=targets if isinstance(targets, str) else _names(targets),
        rank_pattern=MappingProxyType(dict(config.rank_pattern or {})),
        alpha_pattern=MappingProxyType(dict(config.alpha_pattern or {})),
        rslora=config.use_rslora,
        modules_to_save=_names(config.modules_to_save or ()),
    )


def _names(names: Iterable[Any]) -> tuple[str, ...]:
    return tuple(sorted(str(name) for name in names))


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The first pattern that is the module's name or its end, as PEFT matches them."""
    name = module_name(module)
    for pattern, value in patterns.items():
        if matches(pattern, name):
            return value
    return default


def matches(pattern: str, name: str) -> bool:
    """Whether a name or regular expression means the module ``name``."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None
