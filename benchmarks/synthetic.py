"""A grid of sites that do not train: they answer with random updates, made when pulled."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from flwr.app import Message
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from flower_geo.compression import codec, pack
from flower_geo.messages import Reply, Request

Shapes = list[tuple[str, tuple[int, ...]]]


def shapes(small: bool = False) -> Shapes:
    """Tensor shapes of GPT-2 small, or of a twelfth of it."""
    width, layers, words = (768, 12, 50257) if not small else (256, 6, 8192)
    found: Shapes = [("wte", (words, width)), ("wpe", (1024, width)), ("ln_f", (width,))]
    for layer in range(layers):
        found += [
            (f"h.{layer}.attn.w", (width, 3 * width)), (f"h.{layer}.attn.o", (width, width)),
            (f"h.{layer}.mlp.w", (width, 4 * width)), (f"h.{layer}.mlp.o", (4 * width, width)),
            (f"h.{layer}.ln", (width,)),
        ]  # fmt: skip
    return found


class SyntheticGrid(Grid):
    """``count`` nodes whose updates are Gaussian noise of the model's shapes."""

    def __init__(self, count: int, model: Shapes, spec: str = "int8(block=256)") -> None:
        self.count = count
        self.model = model
        self.codec = codec(spec)
        self._ids = itertools.count(1)
        # Flower's processes set these when they take up a task.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self._open: dict[str, Message] = {}

    def set_run(self, run: Any) -> None:
        """Nothing to set."""

    @property
    def run(self) -> Any:
        """No run."""
        return None

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Not used."""
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        """All nodes are up."""
        return list(range(1, self.count + 1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Keep the request without its arrays."""
        ids = []
        for message in messages:
            message_id = f"m{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = message_id
            self._open[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Make the replies now."""
        return [self._answer(self._open.pop(i)) for i in message_ids if i in self._open]

    def _answer(self, message: Message) -> Message:
        request = Request.from_records(message.content)
        site = f"site-{message.metadata.dst_node_id:03d}"
        held = {"held_version": request.version, "held_hash": request.base_hash}
        common: dict[str, Any] = {"site": site, "tokenizer_hash": "same", **held}
        if message.metadata.message_type == "train":
            torch.manual_seed(message.metadata.dst_node_id)
            update = {name: torch.randn(shape) * 1e-3 for name, shape in self.model}
            common |= {
                "round": request.round, "version": request.version,
                "base_hash": request.base_hash, "fingerprint": request.fingerprint,
                "kind": "delta", "arrays": pack(update, self.codec),
                "metrics": {"tokens": 1000.0, "train-loss": 5.0, "seconds": 1.0},
            }  # fmt: skip
        elif message.metadata.message_type == "evaluate":
            common["metrics"] = {"loss-before": 5.0, "eval-tokens": 100.0}
        return Message(Reply(status="done", **common).to_records(), reply_to=message)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        """Push and pull at once."""
        return self.pull_messages(self.push_messages(messages))
