"""A federation in one process: the real strategy and the real site code, no sockets.

``MemoryGrid`` is a Flower ``Grid`` whose nodes are ClientApps called directly;
messages go through Flower's own serialisation, so nothing is shared by
reference.  Faults are put in with ``tamper``: a function of (site, message,
reply) that may return another reply, several, or none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from flower_geo.site import client_app

Tamper = Callable[[str, Message, Message], list[Message]]


@dataclass
class Node:
    """One simulated SuperNode."""

    node_id: int
    config: dict[str, Any]
    app: Any = field(default_factory=client_app)
    online: bool = True


def copied(message: Message) -> Message:
    """The message after a trip through Flower's wire format."""
    return message_from_proto(message_to_proto(message))


class MemoryGrid(Grid):
    """See the module text.

    Attributes:
        served: (site, kind, round) of every request a site worked on.
    """

    def __init__(self, nodes: Iterable[Node], tamper: Tamper | None = None) -> None:
        self.nodes = {node.node_id: node for node in nodes}
        self.tamper = tamper
        self.served: list[tuple[str, str, str]] = []
        self.pushed: list[Message] = []
        self._ids = itertools.count(1)
        # Flower's processes set these when they take up a task.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self._replies: dict[str, list[Message]] = {}

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
        """Ids of the nodes that are up."""
        return [node.node_id for node in self.nodes.values() if node.online]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Serve each message at once and keep the replies."""
        ids = []
        for message in messages:
            message_id = f"m{next(self._ids)}"
            message.metadata.__dict__["_message_id"] = message_id
            self.pushed.append(message)
            ids.append(message_id)
            self._replies[message_id] = self._serve(copied(message))
        return ids

    def _serve(self, message: Message) -> list[Message]:
        node = self.nodes[message.metadata.dst_node_id]
        site = str(node.config.get("site", f"site-{node.config.get('partition-id')}"))
        metadata = message.metadata
        self.served.append((site, metadata.message_type, metadata.group_id))
        context = Context(1, node.node_id, dict(node.config), RecordDict(), {})
        try:
            reply = node.app(message, context)
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<{error}>"), reply_to=message)
        replies = [reply] if self.tamper is None else self.tamper(site, message, reply)
        return [copied(each) if each.has_content() else each for each in replies]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies that are there."""
        found: list[Message] = []
        for message_id in message_ids:
            found.extend(self._replies.pop(message_id, []))
        return found

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Any:
        """Push and pull at once."""
        return self.pull_messages(self.push_messages(messages))


def sites(count: int, state_dir: Any, **config: Any) -> list[Node]:
    """``count`` nodes with the shipped corpora and their state under ``state_dir``."""
    common = {"num-partitions": count, "state-dir": str(state_dir), **config}
    return [Node(100 + index, {"partition-id": index, **common}) for index in range(count)]
