"""A site's half of a cut model: bottom, and top for a U-shape; the rest answers in the stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flower_geo.compression import content_hash, none_grows
from flower_geo.config import SplitConfig
from flower_geo.data import Cursor, load_tokenizer, tokenizer_hash
from flower_geo.data.instructions import chat_template_of, collate
from flower_geo.errors import SessionLost
from flower_geo.messages import Request
from flower_geo.models import AdapterSpec, adapter_state, load_adapter_state
from flower_geo.models.adapted import adapted_base
from flower_geo.models.split import Cut, Role, SplitPart, merge_states, split_parts
from flower_geo.models.split.terms import split_terms
from flower_geo.site.stream import SiteStream
from flower_geo.site.tasks.adapters import Adapters, initial_adapter
from flower_geo.training.settings import inner_config
from flower_geo.training.split import SAMPLES, SiteHalf, SplitLoop
from flower_geo.training.split.settings import auxiliary_of, wire_of

__all__ = ["Split"]


@dataclass(frozen=True)
class _Bench:
    """A site's parts, as the last request of this process left them."""

    model: SiteHalf
    whole: dict[str, Tensor]
    initial_hash: str
    tokenizer: Any
    tokenizer_hash: str
    identity: str
    terms: dict[str, str]


#: The newest bench by all it depends on; only one, since a model is large.
_benches: dict[tuple[Any, ...], _Bench] = {}


def _built(config: SplitConfig, device: str, whole: AdapterSpec, spec: AdapterSpec) -> _Bench:
    made = adapted_base(config, spec, load_tokenizer, chat_template_of)
    parts = split_parts(made.model, Cut(config.cut_bottom, config.cut_top))
    mine: dict[Role, SplitPart] = {r: part for r, part in parts.items() if r != "middle"}
    half = SiteHalf(mine)
    half.to(torch.device(device))
    initial = initial_adapter(_state(half), whole, config.seed)
    return _Bench(
        half, initial, content_hash(initial), made.tokenizer, tokenizer_hash(made.tokenizer),
        made.identity, split_terms(config, made.identity, made.model),
    )  # fmt: skip


class Split(Adapters):
    """See ``tasks.base.Task``; what is said of ``Adapters`` holds for the site's layers."""

    config: SplitConfig
    bench: _Bench
    together = True

    def __init__(
        self,
        config: SplitConfig,
        node_config: Mapping[str, Any],
        device: str,
        total_steps: int,
        phase: Callable[[str], None],
    ) -> None:
        super().__init__(config, node_config, device, total_steps, phase)
        self.growing = none_grows
        self._stream: SiteStream | None = None
        self._loop: SplitLoop | None = None

    def _bench(self, device: str) -> _Bench:
        config = self.config
        key = (
            config.model, config.seed, config.tokenizer, config.seq_len, device, config.mode,
            config.cut_bottom, config.cut_top, repr(self.whole), repr(self.spec),
            config.codec_activations, config.codec_gradients, config.delta_coding,
            config.precision, config.grad_accum,
        )  # fmt: skip
        if key not in _benches:
            _benches.clear()
            _benches[key] = _built(config, device, self.whole, self.spec)
        return _benches[key]

    def _compared(self) -> None:
        """A site has no whole model to be compared with."""

    # -- the others of the round --------------------------------------------------------

    def meet(self, request: Request, site: str, steps: Sequence[int] | None) -> int | None:
        """Join the stream; see ``Task.meet``."""
        if self._stream is None:
            self._stream = SiteStream(
                request, site, self.bench.terms, self.config.stream_deadline, visit=steps is None
            )
        self._loop = None
        return self._stream.join(steps or ())

    def close(self) -> None:
        """End the session."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    # -- the site's half --------------------------------------------------------------

    def load(
        self,
        base: Mapping[str, Tensor],
        round: int,
        personal: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Take the version's adapter at this site's rank and scale."""
        self._round, self._loop = round, None
        mine = self.mine(base)
        for part in self.model.parts.values():
            peft: Any = part.model
            names = adapter_state(peft).keys()
            load_adapter_state(peft, {name: t for name, t in mine.items() if name in names})

    def local(self) -> dict[str, Tensor]:
        """The same as it is now, in the coordinator's scale."""
        return self.sent(_state(self.model))

    def loop(self, prox_mu: float | None = None) -> SplitLoop:
        """A new loop over both parts, which calls the cloud's half."""
        config = self.config
        if self._stream is None:
            raise SessionLost("no stream to the cloud's half is open; join first")
        self._loop = SplitLoop(
            self.model.parts, self._stream, inner_config(config, self.total_steps),
            wire_of(config), config.mode, in_flight=config.in_flight,
            auxiliary=auxiliary_of(config),
        )  # fmt: skip
        return self._loop

    def batches(self, cursor: Cursor) -> Callable[[], dict[str, Tensor]]:
        """Batches of examples from where the cursor stands, each row with its number."""

        def following() -> dict[str, Tensor]:
            rows = cursor.next_indices(self.config.batch_size)
            batch = collate([self.data.train[int(row)] for row in rows], self.pad)
            found = {name: tensor.to(self.device) for name, tensor in batch.items()}
            return found | {SAMPLES: torch.as_tensor([int(row) for row in rows])}

        return following

    def held_out(self) -> dict[str, float]:
        """Loss a token and token accuracy, of both halves."""
        config = self.config
        found = (self._loop or self.loop()).evaluate(
            self.data.held_out, lambda rows: collate(rows, self.pad), config.batch_size,
            max_tokens=config.eval_tokens or None,
        )  # fmt: skip
        return {
            "loss": found.loss, "accuracy": found.accuracy, "eval-tokens": float(found.tokens),
        }  # fmt: skip


def _state(half: SiteHalf) -> dict[str, Tensor]:
    """The adapters' tensors, under PEFT's saved names."""
    pefts: list[Any] = [part.model for part in half.parts.values()]
    return merge_states(*(adapter_state(peft) for peft in pefts))
