"""The arithmetic of the cloud's half: one call after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flower_geo.calls import Answer, Blob, Call
from flower_geo.errors import NonFiniteTensor
from flower_geo.evaluation.batch import IGNORED, Counted, counted
from flower_geo.evaluation.precision import autocast, device_of
from flower_geo.evaluation.text import evaluating
from flower_geo.models.split import SplitPart
from flower_geo.training.schedule import InnerConfig
from flower_geo.training.split.head import logits_of, weighted
from flower_geo.training.split.lane import MAX_COUNT, Lane
from flower_geo.training.split.modes import Mode, sends_labels
from flower_geo.training.split.values import (
    exact_blob,
    integers,
    number_json,
    refused,
    whole_number,
)
from flower_geo.training.split.wire import Wire, WireEnd

__all__ = ["Compute"]

#: Position ids and sample ids are below these.
_MAX_POSITION, _MAX_SAMPLE = 2**24 - 1, 2**53


class Compute:
    """Runs forwards and backwards of a part for the lanes of a round.

    Args:
        part: the middle.
        config: of the inner loop.
        mode: how the halves train each other.
        max_tokens: positions [b * n] of a call at most.
        in_flight: forwards of a lane that may wait for their backward.
    """

    def __init__(
        self, part: SplitPart, config: InnerConfig, mode: Mode, max_tokens: int, in_flight: int
    ) -> None:
        self.part = part
        self.config = config
        self.mode = mode
        self._max_tokens = max_tokens
        self._in_flight = in_flight
        self._device = device_of(part)
        untyped: Any = part.model
        self._width = int(untyped.config.hidden_size)
        self._vocab = int(untyped.config.vocab_size)
        # Attention takes memory by the square of the length.
        longest = getattr(untyped.config, "max_position_embeddings", None)
        self._longest = int(longest) if longest else max_tokens
        # Evaluation has no state: its hidden states come whole and without loss.
        self._plain = WireEnd(Wire(codec_activations="fp32"))

    def forward(self, lane: Lane, call: Call) -> Answer:
        """A micro-batch's forward; with labels at hand, its backward too."""
        if call.micro == 0:
            lane.undo()
        theirs, ours = call.meta.get("mark"), lane.wire.mark
        if theirs != ours and "mark" in call.meta:
            lane.wire.forget()
            return Answer({"again": True})
        samples = _samples(call.meta)
        if not sends_labels(self.mode) and len(lane.graphs) >= self._in_flight:
            raise refused(f"more than {self._in_flight} micro-batches wait for their backward")
        received = lane.wire.receive(
            "lower", call.meta, call.blobs, samples, self._width, self._max_tokens
        )
        hidden = received.to(self._device)
        hidden.requires_grad_(call.meta.get("gradient") is True)
        inputs = self._inputs(call.blobs, hidden)
        count, total = int(call.meta["tokens"]), int(call.meta["total"])
        self.part.train()
        try:
            if sends_labels(self.mode):
                places = self._places(call, hidden, count)
                answer = self._with_labels(lane, call, hidden, inputs, places, total)
            else:
                answer = self._hidden(lane, call, hidden, inputs, samples)
        except NonFiniteTensor:
            answer = None
        if answer is None or answer.meta.get("finite") is False:
            lane.undo()
            return answer or Answer({"finite": False, "loss": "nan"})
        lane.micro += 1
        lane.tokens += count
        lane.total = total
        return answer

    def _with_labels(
        self,
        lane: Lane,
        call: Call,
        hidden: Tensor,
        inputs: Mapping[str, Tensor],
        places: Counted,
        total: int,
    ) -> Answer:
        with lane.half.in_place(), lane.stream.active(), lane.half.gathering(lane.gradients):
            with autocast(self.config.precision, self._device):
                logits, targets = logits_of(self.part, hidden, inputs, places)
                loss = functional.cross_entropy(logits, targets)
            loss = weighted(loss, len(places), total)
            torch.autograd.backward(loss)
        value = float(loss.detach())
        finite = bool(torch.isfinite(loss.detach()))
        meta = {"loss": number_json(value), "finite": finite}
        if not finite or hidden.grad is None:
            return Answer(meta)
        return Answer(meta, lane.wire.send_gradient(hidden.grad))

    def _hidden(
        self,
        lane: Lane,
        call: Call,
        hidden: Tensor,
        inputs: Mapping[str, Tensor],
        samples: list[int] | None,
    ) -> Answer:
        with lane.half.in_place(), lane.stream.active():
            with autocast(self.config.precision, self._device):
                out = self._through(hidden, inputs)
        sent = lane.wire.send("upper", out.detach(), samples)
        lane.graphs[call.micro] = (hidden, out)
        return Answer(sent.meta, sent.blobs)

    def backward(self, lane: Lane, call: Call) -> Answer:
        """The backward of a micro-batch whose gradient at the upper cut has come."""
        hidden, out = lane.graphs[call.micro]
        gradient = lane.wire.receive_gradient(call.blobs, out)
        with lane.half.in_place(), lane.half.gathering(lane.gradients):
            torch.autograd.backward(out, gradient)
        lane.graphs.pop(call.micro)
        lane.back += 1
        if hidden.grad is None:
            return Answer()
        try:
            return Answer({}, lane.wire.send_gradient(hidden.grad))
        except NonFiniteTensor:
            lane.undo()
            return Answer({"finite": False, "loss": "nan"})

    @torch.no_grad()
    def evaluate(
        self, lane: Lane, call: Call, values: Mapping[str, Tensor] | None = None
    ) -> Answer:
        """Held-out examples: loss and hits where labels came, else hidden states.

        Nothing changes: no training mode, random stream or reference.
        """
        received = self._plain.receive(
            "lower", call.meta, call.blobs, None, self._width, self._max_tokens
        )
        hidden = received.to(self._device)
        inputs = self._inputs(call.blobs, hidden)
        precise = autocast(self.config.precision, self._device)
        with lane.half.in_place(values), evaluating(self.part):
            if not sends_labels(self.mode):
                with precise:
                    out = self._through(hidden, inputs)
                sent = {"activation": exact_blob(out, "activation")}
                return Answer({"dtype": str(out.dtype).removeprefix("torch.")}, sent)
            count = whole_number(call.meta, "tokens", MAX_COUNT)
            places = self._places(call, hidden, count)
            with precise:
                logits, targets = logits_of(self.part, hidden, inputs, places)
        losses = functional.cross_entropy(logits, targets, reduction="none")
        return Answer(
            {
                "loss": number_json(float(losses.sum(dtype=torch.float64))),
                "correct": int((logits.argmax(dim=-1) == targets).sum()),
                "tokens": len(places),
            }
        )

    def _through(self, hidden: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.part.run(hidden, inputs.get("attention_mask"), inputs.get("position_ids"))

    def _inputs(self, blobs: Mapping[str, Blob], hidden: Tensor) -> dict[str, Tensor]:
        """Mask and positions of a call, where it has them."""
        rows, length = hidden.shape[0], hidden.shape[1]
        if length > self._longest:
            raise refused(f"its rows have {length} tokens, and the model takes {self._longest}")
        found = {}
        if "mask" in blobs:
            found["attention_mask"] = integers(blobs, "mask", [(rows, length)], 0, 1)
        if "positions" in blobs:
            shapes = [(rows, length), (1, length)]
            found["position_ids"] = integers(blobs, "positions", shapes, 0, _MAX_POSITION)
        return {name: tensor.to(self._device) for name, tensor in found.items()}

    def _places(self, call: Call, hidden: Tensor, count: int) -> Counted:
        """Where the labels of a call count."""
        shape = (hidden.shape[0], hidden.shape[1])
        labels = integers(call.blobs, "labels", [shape], 0, self._vocab - 1, IGNORED)
        # Only the shape of the ids is looked at, which never leave the site.
        places = counted({"input_ids": labels, "labels": labels})
        if len(places) != count or not count:
            raise refused(f"{len(places)} of its labels count, not {count}")
        return places


def _samples(meta: Mapping[str, Any]) -> list[int] | None:
    """Ids of the rows, where they are told."""
    samples = meta.get("samples")
    if samples is None:
        return None
    good = isinstance(samples, list) and all(
        type(value) is int and 0 <= value <= _MAX_SAMPLE for value in samples
    )
    if not good:
        raise refused("its samples are no list of whole numbers from 0")
    return list(samples)
