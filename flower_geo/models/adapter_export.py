"""A trained adapter as a folder that PEFT and vLLM load, or merged into its base."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from flower_geo.durable import atomic_folder, fsync_path, write_json, write_tensors
from flower_geo.models.adapter import (
    ADAPTER,
    check_adapter_state,
    factors_of,
    lora_keys,
    lora_layers,
    saved_parameters,
)
from flower_geo.models.adapter_spec import PREFIX, module_name
from flower_geo.models.card import model_card
from flower_geo.models.export import write_model
from flower_geo.models.fold import Factors, is_quantised, merged_state
from flower_geo.models.state import check_vocab

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel

__all__ = ["export_adapter", "export_merged"]


def export_adapter(
    model: PeftModel,
    state: Mapping[str, Tensor],
    tokenizer: Any,
    folder: str | Path,
    card: Mapping[str, Any] | str,
    folds: Factors | None = None,
    *,
    folded: bool = False,
    merged: bool | None = None,
    base: str | None = None,
) -> None:
    """Write an adapter that ``PeftModel.from_pretrained`` puts on the *original* base.

    What the run folded into the base is stacked beside the factors, at the summed
    rank, so that base + adapter is the trained model; ``merged/`` then holds that
    model whole as well, as an ordinary model folder.  Where modules differ in
    scale, the folder has one scale for all (B takes the difference), as loaders
    that read one α and one r need.
    The model is not touched; an existing folder is replaced in one rename.

    Args:
        model: the model with its adapter (see ``attach``).
        state: the adapter, of any rank; float, any device.
        tokenizer: the tokenizer it was trained with.
        folder: where to write.
        card: README.md, or the facts for it (see ``model_card``).
        folds: (B, A) of scale 1 by module: what the run added to the base.
        folded: ``model``'s live base has ``folds`` already.
        merged: whether to write ``merged/``; None = where there are folds and the
            base is not quantised.
        base: the base model's name in the config and card; None = where the
            model was loaded from.

    Raises:
        ModelError: state, folds or tokenizer do not fit the model.
        StateError: the folder cannot be written.
    """
    plain: Any = model.get_base_model()
    check_adapter_state(model, state, any_rank=True)
    check_vocab(plain, tokenizer)
    base = base or plain.name_or_path or None
    config, tensors = _saved_form(model, state, folds or {}, base)
    if not isinstance(card, str):
        card = model_card({"base_model": base, **card} if base else card)
    if merged is None:
        merged = bool(folds) and not any(is_quantised(layer) for layer in plain.modules())
    with atomic_folder(Path(folder)) as scratch:
        if merged:
            whole = scratch / "merged"
            whole.mkdir()
            live = merged_state(model, state, None if folded else folds)
            write_model(plain, live, tokenizer, whole)
            fsync_path(whole)
        tokenizer.save_pretrained(scratch)
        write_tensors(scratch / "adapter_model.safetensors", tensors)
        write_json(scratch / "adapter_config.json", config)
        (scratch / "README.md").write_text(card, encoding="utf-8")
        for path in scratch.iterdir():
            if path.is_file():
                fsync_path(path)


def export_merged(
    model: PeftModel,
    state: Mapping[str, Tensor],
    tokenizer: Any,
    folder: str | Path,
    folds: Factors | None = None,
) -> None:
    """Write base + ``folds`` + adapter as an ordinary Hugging Face model folder.

    The model is not touched; an existing folder is replaced in one rename.

    Args:
        model: the model with its adapter.
        state: the adapter, of any rank.
        tokenizer: the tokenizer it was trained with.
        folder: where to write.
        folds: (B, A) of scale 1 by module that the live base does not have yet.

    Raises:
        ModelError: something does not fit, or the base is quantised.
        StateError: the folder cannot be written.
    """
    plain: Any = model.get_base_model()
    check_vocab(plain, tokenizer)
    tensors = merged_state(model, state, folds)
    with atomic_folder(Path(folder)) as scratch:
        write_model(plain, tensors, tokenizer, scratch)


def _saved_form(
    model: PeftModel, state: Mapping[str, Tensor], folds: Factors, base: str | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The adapter's config and tensors as PEFT saves them."""
    layers = lora_layers(model)
    factors, whole = factors_of(state)
    live = _live_config(model)
    scales = {name: layer.scaling[ADAPTER] for name, layer in layers.items()}
    same_ranks = all(len(a) == layers[name].r[ADAPTER] for name, (_, a) in factors.items())
    if folds or not same_ranks or len(set(scales.values())) > 1:
        scale = 1.0 if folds else _scale(live)
        factors = _at_one_scale(factors, scales, folds, scale)
        shape = _ranks({name: len(a) for name, (_, a) in factors.items()}, scale)
    else:
        kept = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")
        shape = {name: getattr(live, name) for name in kept}
    targets = live.target_modules if set(factors) == set(layers) else set(factors)
    config = _config(live, _whole_modules(model), base, target_modules=targets, **shape)
    tensors: dict[str, Tensor] = {}
    for name, (b, a) in factors.items():
        key_a, key_b = lora_keys(name)
        tensors |= {key_a: _saved(a), key_b: _saved(b)}
    every = saved_parameters(model)
    for name, tensor in whole.items():
        own = every[f"{PREFIX}{name}"]
        # Safetensors wants a tensor of its own for each name of a tied one.
        tensors |= {twin: _saved(tensor) for twin, other in every.items() if other is own}
    return config, tensors


def _live_config(model: PeftModel) -> LoraConfig:
    return cast("LoraConfig", model.peft_config[ADAPTER])


def _scale(config: LoraConfig) -> float:
    return config.lora_alpha / (math.sqrt(config.r) if config.use_rslora else config.r)


def _whole_modules(model: PeftModel) -> list[str]:
    """``modules_to_save`` as a config asks for them, before PEFT sorted out what is tied."""
    live = _live_config(model)
    names = set(live.modules_to_save or ())
    tied = set(getattr(live, "modules_to_tie", None) or ())
    if tied:
        # PEFT ties again when it loads, and knows the tie by the output layer alone.
        plain: Any = model.get_base_model()
        embedding = plain.get_input_embeddings()
        names -= {name for name, module in plain.named_modules() if module is embedding}
    return sorted(names | tied)


def _config(live: LoraConfig, whole: list[str], base: str | None, **shape: Any) -> dict[str, Any]:
    """adapter_config.json: the live adapter's settings with ``shape`` in their place."""
    from peft import LoraConfig

    config: Any = LoraConfig(
        lora_dropout=live.lora_dropout,
        modules_to_save=whole or None,
        ensure_weight_tying=live.ensure_weight_tying,
        fan_in_fan_out=live.fan_in_fan_out,
        bias="none",
        task_type="CAUSAL_LM",
        inference_mode=True,
        base_model_name_or_path=base,
        **shape,
    )
    values = config.to_dict()
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in values.items()
    }


def _at_one_scale(
    factors: Factors, scales: Mapping[str, float], folds: Factors, scale: float
) -> dict[str, tuple[Tensor, Tensor]]:
    """Factors and folds stacked, so that ``scale`` times B @ A is all of a module's change."""
    parts: dict[str, list[tuple[Tensor, Tensor, float]]] = {}
    for name, (b, a) in factors.items():
        parts.setdefault(name, []).append((b, a, scales[name] / scale))
    for name, (b, a) in folds.items():
        parts.setdefault(module_name(name), []).append((b, a, 1 / scale))
    stacked: dict[str, tuple[Tensor, Tensor]] = {}
    for name, pieces in parts.items():
        b = torch.cat([_saved(b) if f == 1 else _saved(b) * f for b, _, f in pieces], dim=1)
        a = torch.cat([_saved(a) for _, a, _ in pieces])
        stacked[name] = _at_full_rank(b, a) if b.shape[1] > min(len(b), a.shape[1]) else (b, a)
    return stacked


def _at_full_rank(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """The same product at the highest rank it can have: one factor is the identity."""
    product = b @ a
    rows, columns = product.shape
    return (torch.eye(rows), product) if rows <= columns else (product, torch.eye(columns))


def _ranks(ranks: Mapping[str, int], scale: float) -> dict[str, Any]:
    """Ranks by module as PEFT's config has them, with α = scale x r everywhere.

    The widest rank stands for all, so that who reads one rank and one α alone
    allocates enough and scales right.
    """
    widest = max(ranks.values())
    other = {name: rank for name, rank in ranks.items() if rank != widest}
    return {
        "r": widest,
        "lora_alpha": _whole(scale * widest),
        "rank_pattern": other,
        "alpha_pattern": {name: _whole(scale * rank) for name, rank in other.items()},
        "use_rslora": False,
    }


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number


def _saved(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous().clone()
