"""The site's own head: what stands in for the cloud's half where nothing comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_geo.errors import TrainingError
from flower_geo.models.split import SplitPart
from flower_geo.training.optimizer import flat_state, load_flat_state
from flower_geo.training.split.modes import Auxiliary
from flower_geo.training.split.site import Micro

__all__ = ["Probe", "Seen"]

_WEIGHT = "weight/"
#: Keeps a division by the norm of no gradient finite.
_TINY = 1e-30


@dataclass(frozen=True)
class Seen:
    """A micro-batch of which the cloud's gradient is known.

    Attributes:
        hidden: states [b, n, d] of the bottom, detached.
        micro: the rest of it.
        total: labels of the whole step.
        gradient: of the step's mean loss, [b, n, d].
    """

    hidden: Tensor
    micro: Micro
    total: int
    gradient: Tensor | None = None

    def with_gradient(self, gradient: Tensor) -> Seen:
        """The same with the cloud's gradient."""
        return replace(self, gradient=gradient)


class Probe(nn.Module):
    """A small block on the bottom's hidden states, normed, and the embedding.

    h + C attention(h) + B gelu(A h): one causal head and a hidden layer, both of the
    same width.  The embedding is the bottom's, frozen, and no part of the probe's
    state, so that the probe costs six times width * d parameters.

    Args:
        bottom: the site's lower part.
        settings: width and learning rate.
        seed: of the matrices that read h; those that add to it are zero.
        betas, eps: AdamW's.
    """

    def __init__(
        self,
        bottom: SplitPart,
        settings: Auxiliary,
        seed: int,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__()
        untyped: Any = bottom.model
        # In a list, so that it is no parameter of this module.
        self._embedding = [untyped.get_input_embeddings()]
        width, inner = int(untyped.config.hidden_size), settings.width
        device = self._embedding[0].weight.device
        generator = torch.Generator().manual_seed(seed)
        reads = torch.randn(4, inner, width, generator=generator) * width**-0.5
        #: A, then query, key and value.
        self.into = nn.Parameter(reads.to(device))
        #: B, then C.
        self.out = nn.Parameter(torch.zeros(2, width, inner, device=device))
        self.scale = nn.Parameter(torch.ones(width, device=device))
        self._optimizer = torch.optim.AdamW(
            self.parameters(), lr=settings.lr, betas=betas, eps=eps, weight_decay=0.0
        )

    def loss(self, hidden: Tensor, micro: Micro) -> Tensor:
        """Mean loss of the labels that count, from hidden states [b, n, d]."""
        where = micro.places.where.to(hidden.device)
        changed = self.forward(hidden.float(), micro.inputs.get("attention_mask"))
        chosen = changed.flatten(0, 1).index_select(0, where)
        weight: Tensor = self._embedding[0].weight.detach()
        logits = (chosen @ weight.to(chosen.dtype).T).float()
        return functional.cross_entropy(logits, micro.places.targets.to(hidden.device))

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        """What the embedding is multiplied with, [b, n, d] (fp32), for hidden states [b, n, d].

        Args:
            hidden: fp32.
            mask: [b, n], 1 = a token; None = no padding, or some on the right.
        """
        first, query, key, value = (hidden @ matrix.T for matrix in self.into)
        # Written out: torch's fused attention cannot be differentiated twice.
        scores = query @ key.transpose(1, 2) * first.shape[-1] ** -0.5
        seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=hidden.device).tril()
        if mask is not None:
            itself = torch.eye(len(seen), dtype=torch.bool, device=hidden.device)
            seen = seen & (mask[:, None, :] > 0) | itself
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        changed = hidden + functional.gelu(first) @ self.out[0].T + mixed @ self.out[1].T
        size: Tensor = torch.rsqrt(changed.square().mean(-1, keepdim=True) + 1e-6)
        normed: Tensor = changed * size * self.scale
        return normed

    def step(self, rate: float) -> None:
        """Take a step along the gradients there are."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """Drop gradients."""
        self._optimizer.zero_grad(set_to_none=True)

    def align(self, seen: Sequence[Seen], steps: int) -> float:
        """Let the gradient of this head's loss come near the cloud's.

        Minimises the squared distance of the two gradients at the cut as a share
        of the cloud's squared norm (FSL-SAGE, Nair et al. 2025, equation 5).

        Returns:
            The root of that share before the first step; 1 is as good as no head.
        """
        self.forget_gradients()
        first = 0.0
        for index in range(steps):
            error = self._distance(seen)
            first = first if index else float(error.detach().sqrt())
            if not bool(torch.isfinite(error.detach())):
                break
            gradients = torch.autograd.grad(error, list(self.parameters()), allow_unused=True)
            for parameter, gradient in zip(self.parameters(), gradients, strict=True):
                parameter.grad = gradient
            self._optimizer.step()
            self.forget_gradients()
        return first

    def _distance(self, seen: Sequence[Seen]) -> Tensor:
        apart = torch.zeros((), device=self.into.device)
        size = torch.zeros((), device=self.into.device)
        for each in seen:
            assert each.gradient is not None
            hidden = each.hidden.float().requires_grad_(True)
            loss = self.loss(hidden, each.micro) * (len(each.micro) / each.total)
            (own,) = torch.autograd.grad(loss, hidden, create_graph=True)
            wanted = each.gradient.float()
            apart = apart + (own - wanted).square().sum()
            size = size + wanted.square().sum()
        return apart / (size + _TINY)

    def state(self) -> dict[str, Tensor]:
        """Weights and optimizer as CPU copies."""
        named = dict(self.named_parameters())
        weights = {f"{_WEIGHT}{n}": p.detach().to("cpu", copy=True) for n, p in named.items()}
        return weights | flat_state(self._optimizer, named)

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state` gave; ``TrainingError`` where it does not fit."""
        named = dict(self.named_parameters())
        weights = {k.removeprefix(_WEIGHT): v for k, v in state.items() if k.startswith(_WEIGHT)}
        if {n: w.shape for n, w in weights.items()} != {n: p.shape for n, p in named.items()}:
            raise TrainingError(
                "the saved auxiliary head is of another width or model; begin without a state"
            )
        moments = {k: v for k, v in state.items() if not k.startswith(_WEIGHT)}
        load_flat_state(self._optimizer, named, moments)
        for name, parameter in named.items():
            parameter.copy_(weights[name])
