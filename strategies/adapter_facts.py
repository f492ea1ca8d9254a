"""What a trained adapter's model card says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flower_geo.aggregation.adapter_parts import module_of, modules_in
from flower_geo.config import FedAvgLoRAConfig

__all__ = ["CARD", "adapter_facts"]

#: File of a model folder that hubs show as its card.
CARD = "README.md"

#: What each rule makes of the sites' adapters.
_RULES = {
    "avg": "avg: means of A and of B (FedIT), not the mean of the updates",
    "ffa": "ffa: A frozen at a common seed, mean of B (FFA-LoRA), exact",
    "stack": "stack: all factors side by side, folded into the base (FLoRA), exact",
    "residual": "residual: means of A and of B, the rest folded into the base (FedEx-LoRA)",
    "svd": "svd: best adapter of this rank for the exact mean (FlexLoRA)",
    "alternate": "alternate: B in odd rounds, A in even ones (RoLoRA), exact",
}
PRIVACY = (
    "none; updates are sent without noise, the coordinator sees each of them, and nothing bounds "
    "what the adapter tells of single examples"
)


def adapter_facts(
    config: FedAvgLoRAConfig,
    adapter: Mapping[str, Tensor],
    base: Mapping[str, str],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """Facts for ``models.model_card``: what was trained, by how many, how it was sent.

    No site is named in it, and no path of the coordinator's beyond the base model's own.

    Args:
        config: the run's.
        adapter: the coordinator's, for its names and sizes.
        base: hashes of the base model's parts, by name.
        facts: of the run so far, and tables of figures.
    """
    modules = modules_in(adapter)
    whole = sorted(name for name in adapter if not module_of(name))
    tables = {name: value for name, value in facts.items() if isinstance(value, list)}
    return {
        "title": f"LoRA adapter of the run {config.run_name}",
        "base_model": config.model,
        **{name: value for name, value in facts.items() if name not in tables},
        "privacy": PRIVACY,
        "adapter": {
            "modules": len(modules), "kinds": sorted({m.rpartition(".")[2] for m in modules}),
            "rank": config.rank, "alpha": config.alpha,
            **_given(
                config, "rslora", "rank_pattern", "alpha_pattern", "dropout", "modules_to_save"
            ),
            "tensors trained whole": len(whole),
            "trained parameters": sum(tensor.numel() for tensor in adapter.values()),
        },
        "training": {
            "learned": "answers" if config.completion_only else "questions and answers",
            "longest example in tokens": config.seq_len, "local steps a round": config.inner_steps,
            "examples a step": config.batch_size * config.grad_accum,
            "optimizer": config.inner_optimizer, "peak learning rate": config.inner_lr,
            "schedule": config.schedule,
            **_given(config, "weight_decay", "prox_mu", "packing", "inner_seconds"),
            "base at the sites": _bits(config.quantise), "seed": config.seed,
        },
        "aggregation": {
            "rule": _RULES[config.aggregation], "weights": f"by {config.weight_by}",
            "server optimizer": config.server_optimizer, **_given(config, "fold_rank"),
            **({"kept at the sites": config.personal} if config.personal else {}),
        },
        "what was sent": {
            "codec up": config.codec_up, "codec down": config.codec_down,
            "error feedback": config.error_feedback,
        },
        "base model, sha256": dict(base),
        **tables,
    }  # fmt: skip


def _given(config: FedAvgLoRAConfig, *names: str) -> dict[str, Any]:
    """Settings that are not empty, zero or off."""
    return {name: value for name in names if (value := getattr(config, name))}


def _bits(quantise: str) -> str:
    return "fp32" if quantise == "none" else quantise
