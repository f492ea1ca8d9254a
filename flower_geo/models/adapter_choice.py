"""From a configuration to an adapter's shape and its tokenizer, alike at all sites."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from flower_geo.config import FedAvgLoRAConfig, names_of, numbers_of
from flower_geo.errors import ConfigError
from flower_geo.models.adapter_spec import AdapterSpec
from flower_geo.models.gguf import gguf_tokenizer, is_gguf

__all__ = ["adapter_spec", "adapter_tokenizer", "site_spec"]


def adapter_spec(config: FedAvgLoRAConfig) -> AdapterSpec:
    """The adapter at the coordinator.

    Raises:
        ModelError: a value no adapter can have.
    """
    targets = config.target_modules
    return AdapterSpec(
        rank=config.rank,
        alpha=config.alpha,
        dropout=config.dropout,
        target_modules=targets if targets == "auto" else names_of(targets),
        rank_pattern={name: int(rank) for name, rank in numbers_of(config.rank_pattern).items()},
        alpha_pattern=numbers_of(config.alpha_pattern),
        rslora=config.rslora,
        modules_to_save=names_of(config.modules_to_save),
    )


def site_spec(spec: AdapterSpec, rank: int | None, alpha: float | None) -> AdapterSpec:
    """``spec`` as a site with a rank and an alpha of its own has it.

    Raises:
        ConfigError: the rank is higher than the coordinator's.
    """
    if rank is not None:
        if rank > spec.rank:
            raise ConfigError(
                f"node-config rank={rank} is higher than the run's rank={spec.rank}; "
                "set it to that or less"
            )
        pattern = {name: min(each, rank) for name, each in spec.rank_pattern.items()}
        spec = replace(spec, rank=rank, rank_pattern=pattern)
    return spec if alpha is None else replace(spec, alpha=alpha)


def adapter_tokenizer(model: str, tokenizer: str, load: Callable[[str], Any]) -> Any:
    """The tokenizer of a name; ``model`` means the one beside the model, or in its GGUF file.

    Args:
        model: the base.
        tokenizer: "model", or what ``load`` takes.
        load: loads by name or folder, as ``flower_geo.data.load_tokenizer``.

    Raises:
        ModelError: it cannot be loaded.
    """
    name = model if tokenizer == "model" else tokenizer
    return gguf_tokenizer(name) if is_gguf(name) else load(name)
