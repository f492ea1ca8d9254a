"""What each part of a cut model holds and computes, without any weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from flower_geo.models.adapter import attach
from flower_geo.models.adapter_spec import AdapterSpec
from flower_geo.models.adapter_targets import is_linear
from flower_geo.models.build import meta_model
from flower_geo.models.memory import BLOCK_VALUES, FP32, LOGIT_COPIES
from flower_geo.models.split.cut import Cut, layers_of
from flower_geo.models.split.part import split_part
from flower_geo.models.state import vocab_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PartSize", "layer_flops", "part_sizes"]

#: fp32 copies of what trains: weights, gradients, two AdamW moments.
TRAINED_COPIES = 4


@dataclass(frozen=True)
class PartSize:
    """One part of a cut model, or the whole.

    Attributes:
        frozen: values of the base, tied ones once in each part that uses them.
        trained: values of the adapter.
        layers: decoder layers.
        width: hidden size.
        head: rows of the vocabulary where this part has the output head, else 0.
        products: weights that multiply a hidden state: a forward takes two FLOPs each a token.
        attended: values a token of query and key width, over all layers: a forward
            takes two FLOPs each for every token before it, on average half of them.
    """

    frozen: int
    trained: int
    layers: int
    width: int
    head: int
    products: int
    attended: int

    def forward_flops(self, length: int) -> float:
        """FLOPs a token of a forward over sequences of ``length`` tokens (Kaplan et al. 2020)."""
        return 2.0 * (self.products + self.trained) + 2.0 * self.attended * length

    def backward_flops(self, length: int) -> float:
        """The same of a backward: the base is frozen, so only its inputs get a gradient."""
        return 2.0 * self.products + 4.0 * self.trained + 4.0 * self.attended * length

    def memory(self, tokens: int) -> int:
        """Bytes in fp32 to train the adapter with activations of ``tokens`` tokens kept.

        An estimate, as ``memory_estimate`` makes it, without Python and torch themselves.
        """
        activations = BLOCK_VALUES * self.layers * self.width + LOGIT_COPIES * self.head
        return FP32 * (self.frozen + TRAINED_COPIES * self.trained + tokens * activations)


def part_sizes(
    spec: str, cut: Cut, adapter: AdapterSpec | None = None, vocab_size: int | None = None
) -> dict[str, PartSize]:
    """Sizes of a model's parts by role, and of the "whole"; allocates no weights.

    Args:
        spec: as for ``build_model``.
        cut: where it is cut.
        adapter: on every part; None = ``AdapterSpec()``.
        vocab_size: rows of a named model's embedding; None = the table's.

    Raises:
        ModelError: the model is unknown or cannot be cut there, or the adapter does not fit.
    """
    plain = meta_model(spec, vocab_size)
    config = plain.config
    layers, rows = layers_of(config), vocab_rows(plain)
    split_part(plain, cut, "bottom")  # what cannot be cut is refused before PEFT is met
    model: Any = attach(plain, adapter or AdapterSpec(), seed=0)
    counts = {"bottom": cut.bottom, "middle": layers - cut.bottom - cut.top, "top": cut.top}
    sizes: dict[str, PartSize] = {}
    for role in cut.roles:
        part = split_part(model, cut, role)
        sizes[role] = _size(part, counts[role], plain, rows if part.has_head else 0, True)
    sizes["whole"] = _size(model, layers, plain, rows, True)
    return sizes


def layer_flops(model: PreTrainedModel, length: int) -> float:
    """FLOPs a token of a forward and a backward through a frozen model without its head."""
    size = _size(model, layers_of(model.config), model, 0, False)
    return size.forward_flops(length) + size.backward_flops(length)


def _size(
    part: nn.Module, layers: int, plain: PreTrainedModel, head: int, adapted: bool
) -> PartSize:
    """The size of ``part``, cut out of ``plain``; what trains counts where it is ``adapted``."""
    untyped: Any = plain
    config, output = untyped.config, untyped.get_output_embeddings()
    trains = {True: 0, False: 0}
    for parameter in part.parameters():
        trains[adapted and parameter.requires_grad] += parameter.numel()
    linear = [
        module
        for name, module in part.named_modules()
        if is_linear(module) and module is not output and ".lora_" not in name
    ]
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    wide = heads * int(getattr(config, "head_dim", None) or width // heads)
    products = sum(int(module.weight.numel()) for module in linear) + head * width
    return PartSize(trains[False], trains[True], layers, width, head, products, layers * wide)
