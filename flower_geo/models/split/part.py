"""Parts of a causal language model: Hugging Face's own code, with other layers bypassed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from flower_geo.errors import ModelError
from flower_geo.models.adapter import attach
from flower_geo.models.split.cut import Cut, Role, check_cut, layers_of, layout_of
from flower_geo.models.split.shells import Bypass, NoPositions, shell

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from flower_geo.models.adapter_spec import AdapterSpec

__all__ = ["SplitPart", "attach_part", "split_part", "split_parts", "tied_names"]


class SplitPart(nn.Module):
    """One part of a cut model.

    Its parameters have the names they have in the whole model, so that
    ``trained_state``, ``snapshot`` and ``load_state`` take it as they take a
    model, and the states of all parts are together the whole model's.  A tied
    parameter has the name under which ``named_parameters`` of the whole model
    gives it (the embedding's), also in the part that uses it as head.

    Dropout draws from torch's global generator.  Parts of one process that run
    in order (bottom, middle, top) draw what the whole model would have drawn;
    whoever runs them otherwise (another process, several micro-batches in
    flight) must keep a generator state for each part, and gets other draws than
    the unsplit model.

    Attributes:
        model: the Hugging Face model or ``PeftModel`` with what is not this
            part's bypassed; ``attach``, ``adapter_state`` and their kin take it.
        role: which part it is.
        cut: where the model was cut.
        aliases: for parameters which the whole model has under several names:
            name in ``model`` -> the one in the whole model's ``named_parameters``.
    """

    def __init__(
        self, model: nn.Module, role: Role, cut: Cut, aliases: Mapping[str, str] | None = None
    ) -> None:
        """Wrap what ``split_part`` made."""
        super().__init__()
        self.model = model
        self.role: Role = role
        self.cut = cut
        self.aliases = MappingProxyType(dict(aliases or {}))

    @property
    def has_head(self) -> bool:
        """Whether logits come out, not hidden states."""
        return self.role == self.cut.roles[-1]

    def run(
        self,
        inputs: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """One forward through this part.

        Mask and positions must be those the whole model would be given, the same
        for all parts of a forward.

        Args:
            inputs: token ids [b, n] (integers) for the bottom, else the hidden
                states [b, n, d] of the part below, in its dtype.
            attention_mask: [b, n], 1 = a token, 0 = padding on either side; None
                = no padding.
            position_ids: [b, n] or [1, n]; None = 0 ... n-1.

        Returns:
            Hidden states [b, n, d], or logits [b, n, vocab] of the part with the head.

        Raises:
            ModelError: ``inputs`` are not of the kind and shape this part takes.
        """
        untyped: Any = self.model
        if self.role == "bottom":
            if inputs.dim() != 2 or inputs.is_floating_point():
                raise ModelError(
                    f"the bottom part got {inputs.dtype} {tuple(inputs.shape)}; "
                    "give it token ids [batch, length]"
                )
            given = {"input_ids": inputs}
        else:
            width = int(untyped.config.hidden_size)
            if inputs.dim() != 3 or inputs.shape[-1] != width or not inputs.is_floating_point():
                raise ModelError(
                    f"the {self.role} part got {inputs.dtype} {tuple(inputs.shape)}; "
                    f"give it hidden states [batch, length, {width}]"
                )
            given = {"inputs_embeds": inputs}
        output: Tensor = untyped(
            **given, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        ).logits
        return output

    #: What ``nn.Module`` calls.
    forward = run

    def named_modules(
        self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """The model's modules, under the names they have in the whole model."""
        yield from self.model.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The model's parameters, under the names they have in the whole model."""
        lead = f"{prefix}." if prefix else ""
        for name, parameter in self.model.named_parameters("", recurse, remove_duplicate):
            yield lead + self.aliases.get(name, name), parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``state_dict``: a tied tensor under the name it has in this part."""
        return self.model.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a ``state_dict`` of this part."""
        return self.model.load_state_dict(*args, **kwargs)


def split_part(model: PreTrainedModel | PeftModel, cut: Cut, role: Role) -> SplitPart:
    """Cut one part out of a whole model, with or without an adapter.

    The part's layers *are* the model's: nothing is copied, the model itself
    stays whole and usable, and training the part trains it.  Once the caller
    forgets the model, only what the part owns is kept in memory.  Of tied
    embeddings every part that uses them holds the one parameter; parts cut from
    two models hold a copy each (see ``tied_names``).

    Raises:
        ModelError: the model cannot be cut there, or its family not at all, or
            the cut makes no such part.
    """
    config = _causal(model).config
    check_cut(config, cut)
    if role not in cut.roles:
        raise ModelError(
            f"a cut with {cut.top} top layers makes no {role} part; "
            f"it makes {' and '.join(cut.roles)}"
        )
    layout, layers = layout_of(config), layers_of(config)
    start = f"{_prefix(model)}{layout.decoder}"
    bounds = {
        "bottom": range(cut.bottom),
        "middle": range(cut.bottom, layers - cut.top),
        "top": range(layers - cut.top, layers),
    }
    swaps: dict[str, nn.Module] = {
        f"{start}.{layout.layers}.{index}": Bypass()
        for index in range(layers)
        if index not in bounds[role]
    }
    if role != "bottom":
        swaps[f"{start}.{layout.embeddings}"] = Bypass()
        if layout.positions:
            swaps[f"{start}.{layout.positions}"] = NoPositions()
        if layout.dropout:
            swaps[f"{start}.{layout.dropout}"] = Bypass()
    if role != cut.roles[-1]:
        swaps[f"{start}.{layout.norm}"] = Bypass()
        swaps[f"{_prefix(model)}{layout.head}"] = Bypass()
    path = [*_parents(start), start, f"{start}.{layout.layers}"]
    cut_model = shell(model, path, swaps)
    own = {name for name, _ in cut_model.named_parameters(remove_duplicate=False)}
    aliases = {name: first for name, first in _aliases(model).items() if name in own}
    return SplitPart(cut_model, role, cut, aliases)


def split_parts(model: PreTrainedModel | PeftModel, cut: Cut) -> dict[Role, SplitPart]:
    """All parts of one model, by role in the order of a forward; they share its tied weights.

    A site of a U-shape takes its bottom and its top from one call, so that its
    tied embedding is one parameter.

    Raises:
        ModelError: as ``split_part``.
    """
    return {role: split_part(model, cut, role) for role in cut.roles}


def attach_part(part: SplitPart, spec: AdapterSpec, seed: int) -> SplitPart:
    """Put a fresh adapter on a part: the very tensors the whole model's adapter would have there.

    The layers are changed in place, also for the model they were cut from.

    Raises:
        ModelError: as ``attach``; or tied embeddings are to be trained whole,
            which only an adapter on the whole model keeps tied.
    """
    if part.aliases and spec.modules_to_save:
        raise ModelError(
            "modules_to_save on a part of a model with tied embeddings could untie them; "
            "attach the adapter to the whole model and cut that"
        )
    model: Any = part.model
    return SplitPart(attach(model, spec, seed), part.role, part.cut)


def tied_names(part: SplitPart) -> frozenset[str]:
    """Parameters of this part of which the other side, cloud or site, holds a copy.

    The gradient of such a parameter is the sum of both copies' gradients; where
    it is trained, the two sides must exchange theirs before a step.  Names are
    those of the part's ``named_parameters``.  Empty for a U-shape, whose both
    uses lie at the site.
    """
    return frozenset() if part.cut.u_shape else frozenset(part.aliases.values())


def _aliases(model: nn.Module) -> dict[str, str]:
    """Every name of a parameter that has several -> the first of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group[0] for group in names.values() if len(group) > 1 for name in group}


def _is_peft(model: Any) -> bool:
    return hasattr(model, "get_base_model")


def _causal(model: Any) -> Any:
    return model.get_base_model() if _is_peft(model) else model


def _prefix(model: Any) -> str:
    return "base_model.model." if _is_peft(model) else ""


def _parents(name: str) -> list[str]:
    """Names of all modules that hold the named one: "a.b.c" -> ["", "a", "a.b"]."""
    pieces = name.split(".")
    return [".".join(pieces[:count]) for count in range(len(pieces))]
