"""Trained weights as an ordinary Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flower_geo.durable import atomic_folder, fsync_path
from flower_geo.errors import ModelError
from flower_geo.models.build import build_model, meta_model, quiet
from flower_geo.models.state import check_state, check_vocab, trained_state

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["export_model", "write_model"]

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_model(
    spec_or_model: str | PreTrainedModel,
    state: Mapping[str, Tensor],
    tokenizer: Any,
    folder: str | Path,
) -> None:
    """Write model and tokenizer so that the Auto classes of transformers load them.

    The folder is filled beside its place and then renamed into it; a crash
    leaves no half-written folder.  The given model's own weights are not touched.

    Args:
        spec_or_model: the model ``state`` belongs to, or how to build it.
        state: trained state (see ``trained_state``), any float dtype and device.
        tokenizer: a transformers tokenizer; its special tokens become the model's.
        folder: where to write; an existing folder is replaced.

    Raises:
        ModelError: ``state`` or ``tokenizer`` does not fit the model.
        StateError: the folder cannot be written.
    """
    model = _built_for(spec_or_model, state) if isinstance(spec_or_model, str) else spec_or_model
    check_state(model, state)
    check_vocab(model, tokenizer)
    tensors = _full_state(model, state)
    with atomic_folder(Path(folder)) as scratch:
        write_model(model, tensors, tokenizer, scratch)


def write_model(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], tokenizer: Any, folder: Path
) -> None:
    """Fill ``folder`` with a model's config, the given tensors and the tokenizer; flush it.

    Not atomic by itself: use it inside ``atomic_folder``.
    """
    with quiet():
        model.save_pretrained(folder, state_dict=dict(tensors))
        tokenizer.save_pretrained(folder)
    for name in ("config.json", "generation_config.json"):
        _name_special_tokens(folder / name, tokenizer)
    for path in folder.iterdir():
        fsync_path(path)


def _built_for(spec: str, state: Mapping[str, Tensor]) -> PreTrainedModel:
    """The model of ``spec``, with the vocabulary and positions ``state`` was trained with."""
    plan = meta_model(spec)
    sizes: dict[str, int] = {}
    embedding = plan.get_input_embeddings().weight
    for name, parameter in plan.named_parameters():
        if name in state and state[name].dim() > 0:
            rows = int(state[name].shape[0])
            if parameter is embedding:
                sizes["vocab_size"] = rows
            elif name.endswith("wpe.weight"):
                sizes["max_seq_len"] = rows
    return build_model(spec, seed=0, **sizes)


def _full_state(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Everything the checkpoint holds: frozen parameters and buffers from the model."""
    first_name = {id(p): name for name, p in model.named_parameters()}
    alias = {name: first_name[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    trained = {
        # transformers finds ties by storage: each tensor needs one of its own,
        # which memory-mapped ones may not have.
        name: state[name].detach().to("cpu", torch.float32).clone()
        for name in trained_state(model)
    }
    return {
        name: trained.get(alias.get(name, name), tensor.detach())
        for name, tensor in model.state_dict().items()
    }


def _name_special_tokens(path: Path, tokenizer: Any) -> None:
    if not path.is_file():
        return
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{path.name} was written as no JSON: {error}; report this") from error
    for key in _SPECIAL:
        known = getattr(tokenizer, key, None)
        if known is not None:
            values[key] = known
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")
