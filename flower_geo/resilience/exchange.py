"""Pushing requests and taking replies as they come, over any Flower ``Grid``.

``Grid.send_and_receive`` waits for all and sleeps three seconds a pull; here
every reply is handed on the moment it is there, one at a time, so that no more
than one is in memory, and the ones still missing stay open for later rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flower_geo.messages import one_line

__all__ = ["EVALUATE", "QUERY", "TRAIN", "Exchange", "Incoming", "Open"]

#: Message types, as Flower's ClientApp names its handlers.
TRAIN, EVALUATE, QUERY = "train", "evaluate", "query"


@dataclass(frozen=True)
class Open:
    """A request without a reply yet."""

    node_id: int
    site: str
    round: int
    kind: str
    pushed_at: float


@dataclass(frozen=True)
class Incoming:
    """A reply, or word that there will be none.

    Attributes:
        request: the open request it answers.
        records: the content, or None for an error.
        failure: one line when Flower reports an error, else "".
    """

    request: Open
    records: RecordDict | None
    failure: str = ""


class Exchange:
    """The coordinator's open requests.

    Args:
        grid: Flower's grid.
        poll: seconds between two looks at the SuperLink.
        clock, sleep: replaceable for tests.
    """

    def __init__(
        self,
        grid: Grid,
        poll: float = 0.1,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid = grid
        self.poll = poll
        self.clock = clock
        self.sleep = sleep
        self.open: dict[str, Open] = {}

    def nodes(self) -> set[int]:
        """Ids of the nodes the SuperLink believes to be connected."""
        return set(self.grid.get_node_ids())

    def push(self, node_id: int, site: str, round: int, kind: str, records: RecordDict) -> bool:
        """Send one request; False when the SuperLink did not take it.

        Messages go one by one: each has its own ``RecordDict``, and only one is
        in memory beside the arrays they share.
        """
        message = Message(records, node_id, kind, group_id=str(round))
        ids = list(self.grid.push_messages([message]))
        if not ids or not ids[0]:
            return False
        self.open[str(ids[0])] = Open(node_id, site, round, kind, self.clock())
        return True

    def take(self, until: float, wanted: Callable[[Open], bool]) -> Iterator[Incoming]:
        """Yield replies as they arrive, of any round, until ``until`` (clock time).

        Ends early once no open request satisfies ``wanted``; the caller stops
        iterating when it has enough.
        """
        while True:
            for message_id in list(self.open):
                if message_id not in self.open:
                    continue
                for message in self.grid.pull_messages([message_id]):
                    # A lost node's error comes with the SuperLink's own node id,
                    # so replies are matched by the message they answer.
                    answered = self.open.pop(message.metadata.reply_to_message_id, None)
                    if answered is not None:
                        yield _incoming(answered, message)
            if not any(wanted(request) for request in self.open.values()):
                return
            left = until - self.clock()
            if left <= 0:
                return
            self.sleep(min(self.poll, left))

    def drop(self, unwanted: Callable[[Open], bool]) -> None:
        """Stop looking for replies to these requests."""
        self.open = {key: kept for key, kept in self.open.items() if not unwanted(kept)}


def _incoming(request: Open, message: Message) -> Incoming:
    if message.has_error():
        error = message.error
        reason = one_line(str(error.reason or "no reason given"), 300)
        return Incoming(request, None, f"Flower error {error.code}: {reason}")
    if not message.has_content():
        return Incoming(request, None, "the reply is empty")
    return Incoming(request, message.content)
