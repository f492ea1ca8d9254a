"""How a site's half goes through the micro-batches of one step."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from flower_geo.calls import Answer
from flower_geo.errors import CallFailed
from flower_geo.evaluation.precision import autocast
from flower_geo.training.split.head import logits_of, weighted
from flower_geo.training.split.modes import Auxiliary
from flower_geo.training.split.probe import Probe, Seen
from flower_geo.training.split.site import Link, Micro

__all__ = ["Exchange", "NotFinite", "OwnHead", "TopHere", "TopThere"]

#: No hidden states [b, n, d] of a micro-batch that an answer brings have more tokens.
_MAX_TOKENS = 2**24


class NotFinite(Exception):
    """A loss, a hidden state or a gradient is not finite; ``loss`` as far as it is known."""

    def __init__(self, loss: float) -> None:
        super().__init__(loss)
        self.loss = loss


class Exchange(Protocol):
    """Leaves the gradient of a step on the site's parameters."""

    def run(self, step: int, micros: Sequence[Micro], total: int) -> Tensor:
        """Forwards and backwards of a step; the mean loss over its ``total`` labels (0-d, fp32).

        Raises:
            NotFinite: something is not finite.
            SplitError: a call failed.
        """


class TopThere:
    """Head and labels in the cloud: one call a micro-batch brings back loss and gradient.

    Args:
        link: to the cloud.
        in_flight: micro-batches on the wire at most.
    """

    def __init__(self, link: Link, in_flight: int) -> None:
        self._link = link
        self._in_flight = in_flight

    def run(self, step: int, micros: Sequence[Micro], total: int) -> Tensor:
        """See ``Exchange``."""
        link, mean = self._link, _Mean()
        waiting: deque[tuple[Tensor, Future[Answer]]] = deque()

        def finish() -> None:
            hidden, future = waiting.popleft()
            answer = link.took(future)
            mean.add(_loss_in(answer.meta))
            if hidden.requires_grad:
                gradient = link.wire.receive_gradient(answer.blobs, hidden)
                torch.autograd.backward(hidden, gradient)

        for index, micro in enumerate(micros):
            while len(waiting) >= self._in_flight:
                finish()
            hidden = link.below(micro)
            gradient = hidden.requires_grad
            future = link.forward(step, index, micro, hidden, total, gradient=gradient)
            waiting.append((hidden, future))
        while waiting:
            finish()
        return mean.value()


class TopHere:
    """Head and labels at the site: two calls a micro-batch, hidden states there and back.

    Args:
        link: to the cloud.
        in_flight: micro-batches on the wire at most.
    """

    def __init__(self, link: Link, in_flight: int) -> None:
        self._link = link
        self._in_flight = in_flight

    def run(self, step: int, micros: Sequence[Micro], total: int) -> Tensor:
        """See ``Exchange``."""
        link, mean = self._link, _Mean()
        up: deque[tuple[int, Micro, Tensor, Future[Answer]]] = deque()
        down: deque[tuple[Tensor, Future[Answer]]] = deque()

        def turn() -> None:
            index, micro, hidden, future = up.popleft()
            answer = link.took(future)
            _check_finite(answer.meta)
            middle = self._received(answer, micro, hidden)
            mean.add(self._top(micro, middle, total))
            assert middle.grad is not None
            back = link.wire.send_gradient(middle.grad)
            down.append((hidden, link.call("backward", step, index, {}, back)))

        def finish() -> None:
            hidden, future = down.popleft()
            answer = link.took(future)
            _check_finite(answer.meta)
            if hidden.requires_grad:
                gradient = link.wire.receive_gradient(answer.blobs, hidden)
                torch.autograd.backward(hidden, gradient)

        # Which comes next depends on counts alone, never on which answer is there
        # first: a tied weight sums the gradients of both parts in a set order.
        for index, micro in enumerate(micros):
            while len(up) + len(down) >= self._in_flight:
                if down and len(down) >= len(up):
                    finish()
                else:
                    turn()
            hidden = link.below(micro)
            gradient = hidden.requires_grad
            future = link.forward(step, index, micro, hidden, total, gradient=gradient)
            up.append((index, micro, hidden, future))
        while up:
            turn()
        while down:
            finish()
        return mean.value()

    def _received(self, answer: Answer, micro: Micro, hidden: Tensor) -> Tensor:
        rows, length, width = hidden.shape
        found = self._link.wire.receive(
            "upper", answer.meta, answer.blobs, micro.samples, width, _MAX_TOKENS
        )
        if found.shape != hidden.shape:
            raise CallFailed(
                f"the cloud answered hidden states {list(found.shape)}, "
                f"not {[rows, length, width]}; both sides must run the same model"
            )
        return found.to(hidden.device).requires_grad_(True)

    def _top(self, micro: Micro, middle: Tensor, total: int) -> Tensor:
        link = self._link
        assert link.top is not None
        with link.dropout("top").active():
            with autocast(link.precision, link.device):
                logits, targets = logits_of(link.top, middle, micro.inputs, micro.places)
                loss = functional.cross_entropy(logits, targets)
            loss = weighted(loss, len(micro), total)
            torch.autograd.backward(loss)
        detached = loss.detach()
        if not bool(torch.isfinite(detached)):
            raise NotFinite(float(detached))
        return detached


class OwnHead:
    """A head of the site's own trains the bottom; the cloud gets hidden states and labels.

    Args:
        link: to the cloud.
        in_flight: micro-batches on the wire at most.
        probe: the site's head.
        auxiliary: settings.
        aligned: align the head to the cloud's gradient (``sage``), else train it on
            the loss (``cse``).
    """

    def __init__(
        self, link: Link, in_flight: int, probe: Probe, auxiliary: Auxiliary, *, aligned: bool
    ) -> None:
        self._link = link
        self._in_flight = in_flight
        self._probe = probe
        self._settings = auxiliary
        self._aligned = aligned
        #: Share of the cloud's gradient that the head misses, before the newest alignment.
        self.alignment_error: float | None = None

    def run(self, step: int, micros: Sequence[Micro], total: int) -> Tensor:
        """See ``Exchange``; the loss is the cloud's."""
        link, mean = self._link, _Mean()
        align = self._aligned and (step - 1) % self._settings.align_every == 0
        waiting: deque[tuple[Seen | None, Future[Answer]]] = deque()
        seen: list[Seen] = []

        def finish() -> None:
            found, future = waiting.popleft()
            answer = link.took(future)
            mean.add(_loss_in(answer.meta))
            if found is not None:
                gradient = link.wire.receive_gradient(answer.blobs, found.hidden)
                seen.append(found.with_gradient(gradient))

        for index, micro in enumerate(micros):
            while len(waiting) >= self._in_flight:
                finish()
            hidden = link.below(micro)
            future = link.forward(step, index, micro, hidden, total, gradient=align)
            found = Seen(hidden.detach(), micro, total) if align else None
            waiting.append((found, future))
            with autocast(link.precision, link.device):
                own = self._probe.loss(hidden, micro)
            torch.autograd.backward(weighted(own, len(micro), total))
        while waiting:
            finish()
        if seen:
            self.alignment_error = self._probe.align(seen, self._settings.align_steps)
        return mean.value()


class _Mean:
    """The loss of a step, summed as the unsplit loop sums it."""

    def __init__(self) -> None:
        self._sum: Tensor | None = None

    def add(self, loss: Tensor) -> None:
        self._sum = loss if self._sum is None else self._sum + loss

    def value(self) -> Tensor:
        assert self._sum is not None
        return self._sum


def _check_finite(meta: Mapping[str, Any]) -> None:
    if meta.get("finite") is False:
        raise NotFinite(_number(meta.get("loss", "nan")))


def _loss_in(meta: Mapping[str, Any]) -> Tensor:
    """The loss an answer tells."""
    _check_finite(meta)
    return torch.tensor(_number(meta.get("loss")), dtype=torch.float32)


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise CallFailed(
            "the cloud's answer has no loss; both sides must run the same mode"
        ) from None
