"""Pushing requests and taking replies as they come, over any Flower ``Grid``.

``Grid.send_and_receive`` waits for all and sleeps three seconds a pull; here
every reply is handed on the moment it is there, one at a time, so that few are in
memory, and the ones still missing stay open for later rounds.  One whose upload
takes long keeps nobody from the others, nor from the round's end.

A SuperLink that cannot be talked to is waited for, with growing and jittered
pauses: a pull up to the round's end, anything else for ``patience`` seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from flower_geo.errors import FlowerGeoError, SuperLinkLost
from flower_geo.messages import one_line
from flower_geo.resilience.network import Backoff, StallWatch, is_trouble
from flower_geo.resilience.pulls import Pulls

__all__ = ["EVALUATE", "QUERY", "TRAIN", "Exchange", "Incoming", "Open"]

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: Flower's code for a node whose heartbeat is gone.
NODE_UNAVAILABLE = 5

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
    message_id: str = field(default="", compare=False)


@dataclass(frozen=True)
class Incoming:
    """A reply, or word that there will be none.

    Attributes:
        request: the open request it answers.
        records: the content, or None for an error.
        failure: one line when Flower reports an error, else "".
        node_gone: the error says that the node itself is not there any more.
    """

    request: Open
    records: RecordDict | None
    failure: str = ""
    node_gone: bool = False


class Exchange:
    """The coordinator's open requests.

    Args:
        grid: Flower's grid.
        poll: seconds between two looks at the SuperLink.
        clock, sleep: replaceable for tests.

    Attributes:
        open: message id -> request without a reply.
        patience: seconds a SuperLink may be away before the run ends.
        tell: takes one line when trouble on the way begins or ends.
        watch: notices calls that do not come back; None = nobody looks.
        pulls: the pulls under way.
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
        self.patience = 3600.0
        self.tell: Callable[[str], None] = logger.warning
        self.watch: StallWatch | None = None
        self.pulls = Pulls(self._pull)
        self._backoff = Backoff()
        self._away_since: float | None = None
        self._again_at = 0.0

    def nodes(self) -> set[int]:
        """Ids of the nodes the SuperLink believes to be connected.

        Raises:
            SuperLinkLost: it could not be reached for ``patience`` seconds.
        """
        return self._patiently("look at the nodes", lambda: set(self.grid.get_node_ids()))

    def glance(self) -> set[int] | None:
        """Like :meth:`nodes` in one try at most; None when the SuperLink cannot be reached now."""
        if self._resting():
            return None
        try:
            return self._call("look at the nodes", lambda: set(self.grid.get_node_ids()))
        except Exception as error:
            self._trouble("look at the nodes", error)
            return None

    def _resting(self) -> bool:
        """Whether the SuperLink is away, and not to be tried again yet."""
        return self._away_since is not None and self.clock() < self._again_at

    def _patiently(self, what: str, call: Callable[[], _T]) -> _T:
        limit = self.clock() + self.patience
        while True:
            try:
                return self._call(what, call)
            except Exception as error:
                pause = self._trouble(what, error)
                if self.clock() + pause > limit:
                    raise SuperLinkLost(
                        f"the SuperLink could not be reached for {self.patience:g} s "
                        f"({what}: {_said(error)}); bring it back and run again: what was "
                        "committed stays"
                    ) from error
                self.sleep(pause)

    def _call(self, what: str, call: Callable[[], _T]) -> _T:
        with nullcontext() if self.watch is None else self.watch.calling(what):
            found = call()
        if self._away_since is not None:
            self.tell(f"the SuperLink answers again after {self.clock() - self._away_since:.0f} s")
            self._away_since = None
            self._backoff.reset()
        return found

    def _trouble(self, what: str, error: Exception) -> float:
        """Seconds to wait before the next try; errors of another kind are raised again."""
        if not is_trouble(error):
            raise error
        if self._away_since is None:
            self._away_since = self.clock()
            self.tell(f"the SuperLink cannot be reached ({what}: {_said(error)}); trying again")
        pause = self._backoff.next()
        self._again_at = self.clock() + pause
        return pause

    def push(self, node_id: int, site: str, round: int, kind: str, records: RecordDict) -> bool:
        """Send one request; False when the SuperLink did not take it.

        Messages go one by one: each has its own ``RecordDict``, and only one is
        in memory beside the arrays they share.

        Raises:
            SuperLinkLost: it could not be reached for ``patience`` seconds.
        """

        def send() -> list[str]:
            # A new message each try: of one that got through in part nobody knows how much.
            message = Message(records, node_id, kind, group_id=str(round))
            return list(self.grid.push_messages([message]))

        ids = self._patiently("push", send)
        if not ids or not ids[0]:
            return False
        key = str(ids[0])
        self.open[key] = Open(node_id, site, round, kind, self.clock(), key)
        return True

    def take(self, until: float, wanted: Callable[[Open], bool]) -> Iterator[Incoming]:
        """Yield replies as they arrive, of any round, until ``until`` (clock time).

        Ends early once no open request satisfies ``wanted``; the caller stops
        iterating when it has enough.
        """
        while True:
            for message_id in list(self.open):
                if message_id not in self.open or self.pulls.asked(message_id):
                    continue
                if self.pulls.full or self._resting():
                    break
                with nullcontext() if self.watch is None else self.watch.calling("pull"):
                    pulled = self.pulls.ask(message_id)
                if pulled is not None:
                    yield from self._ended(message_id, pulled)
            for message_id, pulled in self.pulls.ended():
                yield from self._ended(message_id, pulled)
            if not self.awaits(wanted):
                return
            left = until - self.clock()
            if left <= 0:
                return
            pause = self.poll
            if self._away_since is not None:
                pause = max(pause, self._again_at - self.clock())
            self.sleep(min(pause, left))

    def _pull(self, message_id: str) -> list[Message]:
        return list(self.grid.pull_messages([message_id]))

    def _ended(self, message_id: str, pulled: Future[list[Message]]) -> Iterator[Incoming]:
        try:
            messages = self._call("pull", pulled.result)
        except FlowerGeoError:
            raise
        except Exception as error:
            if is_trouble(error):
                self._trouble("pull", error)
                return
            # Flower could not put the reply together: the fault of what is in it.
            spoilt = self.open.pop(message_id, None)
            if spoilt is not None:
                yield Incoming(spoilt, None, f"its reply cannot be read: {_said(error)}")
            return
        for message in messages:
            # A lost node's error comes with the SuperLink's own node id,
            # so replies are matched by the message they answer.
            answered = self.open.pop(message.metadata.reply_to_message_id, None)
            if answered is not None:
                yield _incoming(answered, message)

    def close(self) -> None:
        """Wait for no more replies."""
        self.pulls.close()

    def awaits(self, wanted: Callable[[Open], bool]) -> bool:
        """Whether a reply is outstanding to a request of this sort."""
        return any(wanted(request) for request in self.open.values())

    def drop(self, unwanted: Callable[[Open], bool]) -> None:
        """Stop looking for replies to these requests."""
        self.open = {key: kept for key, kept in self.open.items() if not unwanted(kept)}


def _incoming(request: Open, message: Message) -> Incoming:
    if message.has_error():
        error = message.error
        reason = one_line(str(error.reason or "no reason given"), 300)
        gone = error.code == NODE_UNAVAILABLE
        return Incoming(request, None, f"Flower error {error.code}: {reason}", gone)
    if not message.has_content():
        return Incoming(request, None, "the reply is empty")
    return Incoming(request, message.content)


def _said(error: Exception) -> str:
    return one_line(f"{type(error).__name__}: {error}", 200)
