"""What is let in: checks of one reply by itself.

What is refused costs that reply, never the round.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.compression import Codec, unpack_blobs
from flower_geo.errors import CorruptPayload, ReplyRefused
from flower_geo.messages import Reply, Request

__all__ = ["Screen"]

#: A loss has not exploded before it is so many nats above the usual.
MIN_EXCESS = 1.0


class Screen:
    """Checks of one reply against what was asked and against what is usual.

    Args:
        max_norm_factor: an update whose L2 norm is more than this many times
            the running median is refused; 0 switches the check off.
        memory: accepted norms and losses the medians run over.
        max_loss_factor: the same for the training loss; 0 = off.
        max_claim_factor: tokens, examples and steps a site may claim, in
            multiples of what the request asks for; 0 = off.  Above 1, since
            a site may set its own batch size and steps.
    """

    #: Norms (losses) that must be known before one can be called unusual.
    MIN_HISTORY = 4

    def __init__(
        self,
        max_norm_factor: float = 10.0,
        memory: int = 64,
        max_loss_factor: float = 0.0,
        max_claim_factor: float = 0.0,
    ) -> None:
        self.max_norm_factor = max_norm_factor
        self.max_loss_factor = max_loss_factor
        self.max_claim_factor = max_claim_factor
        self.norms: deque[float] = deque(maxlen=memory)
        self.losses: deque[float] = deque(maxlen=memory)

    def check(self, request: Request, reply: Reply, base: Mapping[str, Tensor]) -> float:
        """Return the update's L2 norm, or raise ``ReplyRefused`` with the reason.

        One tensor is decoded at a time; ``base`` gives names and shapes.
        """
        self._check_echo(request, reply)
        if reply.arrays is None or reply.kind == "none":
            raise ReplyRefused("it holds no update")
        for key in ("train-loss", "loss-last"):
            if not math.isfinite(reply.metrics.get(key, 0.0)):
                raise ReplyRefused(f"{key} is not finite")
        self._check_claims(request, reply)
        loss = reply.metrics.get("train-loss")
        usual = self._usual(self.losses)
        if loss is not None and self.max_loss_factor and usual is not None:
            if loss > max(self.max_loss_factor * usual, usual + MIN_EXCESS):
                raise ReplyRefused(
                    f"its training loss {loss:.3g} is more than {self.max_loss_factor:g} times "
                    f"the usual {usual:.3g}"
                )
        norm = self._norm(reply.arrays, reply.kind, base)
        usual = self._usual(self.norms)
        if self.max_norm_factor and usual and norm > self.max_norm_factor * usual:
            raise ReplyRefused(
                f"its norm {norm:.3g} is more than {self.max_norm_factor:g} times the usual "
                f"{usual:.3g}"
            )
        self.remember(norm, loss)
        return norm

    def remember(self, norm: float, loss: float | None) -> None:
        """Let an accepted reply count for what is usual."""
        self.norms.append(norm)
        if loss is not None:
            self.losses.append(loss)

    def state(self) -> dict[str, list[float]]:
        """JSON state."""
        return {"norms": list(self.norms), "losses": list(self.losses)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`state` gave."""
        for history, key in ((self.norms, "norms"), (self.losses, "losses")):
            history.clear()
            history.extend(float(value) for value in state.get(key, ()))

    def _usual(self, history: deque[float]) -> float | None:
        return statistics.median(history) if len(history) >= self.MIN_HISTORY else None

    @staticmethod
    def _check_echo(request: Request, reply: Reply) -> None:
        """A reply to another question, perhaps of an earlier life of the server, is named so."""
        if (reply.round, reply.version) != (request.round, request.version):
            raise ReplyRefused(
                f"it answers round {reply.round} from version {reply.version}, "
                f"not round {request.round} from version {request.version}"
            )
        for what, got, wanted in (
            ("other weights", reply.base_hash, request.base_hash),
            ("another configuration", reply.fingerprint, request.fingerprint),
        ):
            if got != wanted:
                raise ReplyRefused(
                    f"it was trained from {what} ({got[:12]}), not round {request.round} from "
                    f"version {request.version} as asked ({wanted[:12]}): an answer to an earlier "
                    "life of the coordinator"
                )

    def _check_claims(self, request: Request, reply: Reply) -> None:
        """Weights and speeds rest on these counts, so one site may not claim any number."""
        config, names = request.config, ("inner-steps", "batch-size", "grad-accum", "seq-len")
        if not self.max_claim_factor or config.get("inner-seconds"):
            return  # by time, nobody knows how many steps fit
        if any(type(config.get(name)) is not int for name in names):
            return
        steps, batch, accum, length = (int(config[name]) for name in names)
        examples = steps * batch * accum
        asked = {"steps": steps, "examples": examples, "tokens": examples * (length - 1)}
        for key, most in asked.items():
            claimed = reply.metrics.get(key, 0.0)
            if claimed > self.max_claim_factor * most:
                raise ReplyRefused(
                    f"it claims {claimed:g} {key}, more than {self.max_claim_factor:g} times the "
                    f"{most} it was asked for; if its node-config asks for so many, raise "
                    "max-claim-factor"
                )

    @staticmethod
    def _norm(arrays: ArrayRecord, kind: str, base: Mapping[str, Tensor]) -> float:
        total = 0.0
        try:
            blobs = unpack_blobs(arrays, {name: tuple(t.shape) for name, t in base.items()})
            for name, blob in blobs.items():
                tensor = Codec.decode(blob, shape=tuple(base[name].shape))
                if kind == "weights":
                    tensor = base[name] - tensor
                squared = float(torch.sum(tensor.double() ** 2)) if tensor.numel() else 0.0
                if not math.isfinite(squared):
                    raise ReplyRefused(f"tensor {name} is not finite")
                total += squared
        except CorruptPayload as error:
            raise ReplyRefused(str(error)) from None
        return math.sqrt(total)
