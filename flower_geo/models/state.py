"""The trained state of a model: what is sent, averaged and kept.

Trained state is the parameters that require a gradient, by the name under which
``named_parameters`` meets them first.  A tensor tied to several places is one
entry; buffers (rotary tables, causal masks, counters) and frozen parameters are
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flower_geo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "check_state",
    "check_vocab",
    "listed",
    "load_state",
    "snapshot",
    "trained_state",
    "vocab_rows",
]

#: Embedding rows a model may have beyond its tokenizer: publishers pad the
#: vocabulary to a multiple that suits their hardware (Phi-2: 905 rows).
SPARE_ROWS = 1024


def _trained(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in model.named_parameters() if p.requires_grad)


def trained_state(model: nn.Module) -> dict[str, Tensor]:
    """The live trained parameters by name, in the order the model registers them.

    The tensors share storage with the model, are detached from autograd and keep
    the model's dtype and device: reading them reads the model, writing into them
    writes the model.
    """
    return {name: parameter.detach() for name, parameter in _trained(model)}


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """Contiguous fp32 CPU copies of :func:`trained_state`."""
    return {
        name: tensor.to("cpu", torch.float32, copy=True, memory_format=torch.contiguous_format)
        for name, tensor in trained_state(model).items()
    }


@torch.no_grad()
def load_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy ``state`` into the model's trained parameters, in place; ties stay tied.

    Nothing is written unless everything fits.

    Raises:
        ModelError: names are missing or unknown, or a shape differs.
    """
    check_state(model, state)
    for name, parameter in _trained(model):
        parameter.copy_(state[name])


def check_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Raise ``ModelError`` unless ``state`` has exactly the model's trained names and shapes."""
    trained = dict(_trained(model))
    faults = [
        *listed("lack", [name for name in trained if name not in state]),
        *listed("hold unknown", [name for name in state if name not in trained]),
        *listed(
            "have other shapes at",
            [
                f"{name} ({tuple(state[name].shape)}, not {tuple(parameter.shape)})"
                for name, parameter in trained.items()
                if name in state and state[name].shape != parameter.shape
            ],
        ),
    ]
    if faults:
        raise ModelError(
            f"these weights do not fit the model: they {' and '.join(faults)}; "
            "use weights of the same model, vocabulary and sequence length"
        )


def listed(what: str, names: list[str]) -> list[str]:
    """[] for no names, else one phrase: ``what``, three of them and how many more."""
    if not names:
        return []
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return [f"{what} {shown}"]


def check_vocab(model: PreTrainedModel, tokenizer: Any) -> None:
    """Raise ``ModelError`` unless the model's embedding belongs to the tokenizer.

    It must have a row for every token, and at most ``SPARE_ROWS`` (1024) rows
    more: a larger gap means a model beside another model's tokenizer.
    """
    rows, tokens = vocab_rows(model), len(tokenizer)
    if not tokens <= rows <= tokens + SPARE_ROWS:
        raise ModelError(
            f"the model has a vocabulary of {rows} and the tokenizer one of {tokens}; "
            "give the tokenizer that belongs to the model"
        )


def vocab_rows(model: PreTrainedModel) -> int:
    """Rows of the model's input embedding."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return int(weight.shape[0])
