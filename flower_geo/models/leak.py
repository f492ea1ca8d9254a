"""How much of a site's text somebody gets back who sees the activations it sends.

Everything a site sends in split learning is a function of its text, computed by
layers whose base weights are public.  The attacks here use only that: the public
model, the activations as they arrive (after noise and codec), and public text.
What they recover is a lower bound: an attacker with a language model as prior, or
with a trained inverter, does better.

- ``nearest``: the token whose embedding is nearest to the activation by cosine.
- ``dictionary``: the token whose own activation, behind a public context, is.
- ``linear``: the nearest embedding to what a linear map makes of the activation;
  the map is fitted on public text.
- ``replay``: text is recovered from the left; candidates of the others are run
  through the bottom behind what is recovered already, and the likeliest is taken:
  by the noise between its activation and the one that arrived, and by what the
  public model expects there.  Without noise, a causal model's activations tell
  tokens apart almost surely (Nikolaou et al. 2025), so that this finds the text
  itself as long as the right token is among the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flower_geo.errors import DataError, ModelError
from flower_geo.models.leak_attacks import (
    Coded,
    activations,
    dictionary,
    linear,
    nearest,
    replay,
    unlike,
)
from flower_geo.models.split.cut import Cut, check_cut
from flower_geo.models.split.noise import check_sigma, noise_generator, noised
from flower_geo.models.split.part import split_part

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = ["ATTACKS", "Attack", "Leak", "measure_leak"]

#: Names of the attacks, weakest first.
ATTACKS = ("nearest", "dictionary", "linear", "replay")


@dataclass(frozen=True)
class Leak:
    """What was recovered at one cut and noise level; shares of tokens, 0 to 1.

    Attributes:
        cut: bottom layers at the site.
        noise: sigma relative to each token's RMS.
        tokens: how many tokens were attacked.
        nearest: recovered by the nearest embedding.
        dictionary: by a dictionary of activations.
        linear: by a linear map; None without public text.
        replay: by replaying candidates in context; None if not asked for.
    """

    cut: int
    noise: float
    tokens: int
    nearest: float
    dictionary: float
    linear: float | None
    replay: float | None

    @property
    def best(self) -> float:
        """The largest share any of the attacks recovered."""
        found = (self.nearest, self.dictionary, self.linear, self.replay)
        return max(share for share in found if share is not None)


@dataclass(frozen=True)
class Attack:
    """What the attacker does and knows.

    Attributes:
        public: text [rows, n'], n' at least that of the site's rows, to learn from;
            None = no linear map, and a dictionary behind the first token alone.
        replay: whether to replay.
        candidates: tokens tried at each place in the replay; the vocabulary or more =
            all of it.
        knows_adapter: whether the attacker has the site's adapter as well.
    """

    public: Tensor | None = None
    replay: bool = True
    candidates: int = 4096
    knows_adapter: bool = False


@torch.no_grad()
def measure_leak(
    model: PreTrainedModel | PeftModel,
    ids: Tensor,
    cuts: Sequence[int],
    noises: Sequence[float] = (0.0,),
    *,
    coded: Coded = lambda hidden: hidden,
    attack: Attack | None = None,
    seed: int = 0,
) -> list[Leak]:
    """Attack what a site would send of a text.

    A function of its arguments alone; no random state of the process moves.
    Beside the model it holds a few arrays of ``ids``' activations and a piece of
    the vocabulary's.

    Args:
        model: the whole model, with the site's adapter if there is one.
        ids: the site's text as token ids [rows, n], each row from position 0 on.
        cuts: numbers of bottom layers to try.
        noises: sigmas to try, see ``noised``.
        coded: what the receiver decodes of activations [rows, n, d].
        attack: None = ``Attack()``.
        seed: of the noise.

    Returns:
        One ``Leak`` a cut and noise level, in the order given.

    Raises:
        ModelError: the model cannot be cut there.
        ConfigError: a noise level is no number from 0.
        DataError: there is no text.
    """
    attack = attack or Attack()
    if ids.dim() != 2 or not ids.numel():
        raise DataError(f"no text to attack: token ids of shape {tuple(ids.shape)}; give more text")
    if attack.candidates < 1:
        raise ModelError(f"{attack.candidates} candidates are none to replay; use 1 or more")
    if attack.public is not None and attack.public.shape[-1] < ids.shape[1]:
        raise DataError(
            f"public rows of {attack.public.shape[-1]} tokens are shorter than the site's of "
            f"{ids.shape[1]}; pack both to one length"
        )
    for cut in cuts:
        check_cut(_config(model), Cut(cut))
    levels = [check_sigma(sigma) for sigma in noises]
    training = model.training
    model.train(False)
    try:
        return [leak for cut in cuts for leak in _at_cut(model, ids, cut, levels, coded, attack,
                                                         seed)]  # fmt: skip
    finally:
        model.train(training)


def _at_cut(
    model: Any, ids: Tensor, cut: int, noises: Sequence[float], coded: Coded, attack: Attack,
    seed: int,
) -> list[Leak]:  # fmt: skip
    bottom = split_part(model, Cut(cut), "bottom")
    ids = ids.to(next(bottom.parameters()).device)
    hidden = activations(bottom, ids)

    def streams(name: str) -> list[torch.Generator]:
        return [noise_generator(seed, name, cut, str(sigma)) for sigma in noises]

    levels = zip(noises, streams("leak"), strict=True)
    sent = torch.stack([coded(noised(hidden, sigma, draw)) for sigma, draw in levels])
    with _as_public(model, attack.knows_adapter):
        table = model.get_input_embeddings().weight.detach().float()
        every = attack.candidates >= len(table)
        count = 1 if every or not attack.replay else -(-attack.candidates // 4)
        public = ids.new_zeros(1, ids.shape[1]) if attack.public is None else attack.public
        public = public.to(ids.device)
        found = {
            "nearest": nearest(table, sent, count),
            "dictionary": dictionary(bottom, sent, public, count),
        }
        if attack.public is not None:
            found["linear"] = linear(
                bottom, table, sent, noises, coded, public, streams("public"), count
            )
        if attack.replay:
            tried = None if every else torch.cat([*found.values()], 1)
            variances = unlike(bottom, noises, coded, public, streams("unlike"))
            found["replay"] = replay(bottom, model, sent, variances, tried)
    first = {name: tokens[:, 0] for name, tokens in found.items()}
    share: dict[str, list[float]] = {
        name: (tokens.view(len(noises), -1) == ids.flatten()).double().mean(1).tolist()
        for name, tokens in first.items()
    }

    def recovered(name: str, level: int) -> float | None:
        return share[name][level] if name in share else None

    return [
        Leak(
            cut, sigma, ids.numel(), share["nearest"][level], share["dictionary"][level],
            recovered("linear", level), recovered("replay", level),
        )
        for level, sigma in enumerate(noises)
    ]  # fmt: skip


def _as_public(model: Any, knows_adapter: bool) -> AbstractContextManager[Any]:
    """The model as the attacker has it."""
    if knows_adapter or not hasattr(model, "disable_adapter"):
        return nullcontext()
    context: AbstractContextManager[Any] = model.disable_adapter()
    return context


def _config(model: Any) -> Any:
    return model.get_base_model().config if hasattr(model, "get_base_model") else model.config
