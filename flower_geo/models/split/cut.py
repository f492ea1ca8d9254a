"""Where a model is cut, and the places of the models that can be cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

from flower_geo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["LAYOUTS", "Cut", "Layout", "Role", "check_cut", "layers_of", "layout_of"]

#: The pieces of a cut model, in the order in which a forward meets them.
Role = Literal["bottom", "middle", "top"]


@dataclass(frozen=True)
class Cut:
    """How many layers lie at the site, below and above the cloud's.

    Attributes:
        bottom: layers of the site's lower part, which also holds the embeddings.
            0: the site sends embeddings, which give every token away.
        top: last layers, which lie at the site with the final norm and the head
            (U-shape); 0 = norm and head are in the cloud.
    """

    bottom: int
    top: int = 0

    @property
    def u_shape(self) -> bool:
        """Whether the head lies at the site, so that labels need not leave it."""
        return self.top > 0

    @property
    def roles(self) -> tuple[Role, ...]:
        """The parts this cut makes, in the order of a forward."""
        return ("bottom", "middle", "top") if self.u_shape else ("bottom", "middle")


@dataclass(frozen=True)
class Layout:
    """Names of a decoder's pieces in one family of models.

    Attributes:
        decoder: of the decoder in the causal language model.
        embeddings: of the token embeddings in the decoder.
        layers: of the list of layers in the decoder.
        norm: of the final norm in the decoder.
        positions: of the learned position embeddings in the decoder, if it has any.
        dropout: of the dropout on the embeddings in the decoder, if it has any.
        head: of the head in the causal language model.
    """

    decoder: str
    embeddings: str
    layers: str
    norm: str
    positions: str | None = None
    dropout: str | None = None
    head: str = "lm_head"


_ROTARY = Layout("model", "embed_tokens", "layers", "norm")

#: Families that can be cut, by transformers' model type.  Each adds nothing to its
#: hidden states between the layers and takes ``inputs_embeds`` as they are.
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {
        "gpt2": Layout("transformer", "wte", "h", "ln_f", positions="wpe", dropout="drop"),
        "llama": _ROTARY,
        "mistral": _ROTARY,
        "qwen2": _ROTARY,
        "qwen3": _ROTARY,
    }
)


def layout_of(config: PreTrainedConfig) -> Layout:
    """The layout of a model that can be cut.

    Raises:
        ModelError: its family is none of ``LAYOUTS``.
    """
    found = LAYOUTS.get(config.model_type)
    if found is None:
        raise ModelError(
            f"a {config.model_type} model cannot be cut into parts; "
            f"use one of the families {', '.join(LAYOUTS)}"
        )
    return found


def layers_of(config: PreTrainedConfig) -> int:
    """Number of layers of the whole model."""
    return int(config.num_hidden_layers)


def check_cut(config: PreTrainedConfig, cut: Cut) -> None:
    """Raise ``ModelError`` unless the model can be cut so, with a layer left for the cloud."""
    layout_of(config)
    layers = layers_of(config)
    for name, value in (("bottom", cut.bottom), ("top", cut.top)):
        if type(value) is not int or value < 0:
            raise ModelError(f"{name} layers at the site are {value!r}; use a whole number from 0")
    if cut.bottom + cut.top >= layers:
        raise ModelError(
            f"{cut.bottom} bottom and {cut.top} top layers at the site leave none of the model's "
            f"{layers} to the cloud; keep at most {layers - 1} at the site"
        )
