"""A SuperLink that is away for a while: which errors mean that, how long to wait, who notices.

Flower's HTTP grid tries again by itself, without end, while nothing can be
connected to; that shows as a call that does not come back.  What it passes on
(a status such as 500, a push session that ran out, a broken TLS handshake)
comes up as an exception.  Both are trouble on the way, and no reason to end a
run before its deadline.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Backoff", "StallWatch", "is_trouble"]

#: Libraries whose errors are about the way to the SuperLink.
_NETWORK = frozenset({"grpc", "httpcore", "httpx"})
#: Flower's own about objects that did not get through; they share no base class.
_OBJECTS = frozenset({"ObjectPullError", "ObjectPushError", "ObjectUnavailableError"})


def is_trouble(error: BaseException) -> bool:
    """Whether an error of a grid's call says that the SuperLink could not be talked to."""
    if isinstance(error, OSError):
        return True
    return any(
        kind.__module__.partition(".")[0] in _NETWORK
        or (kind.__name__ in _OBJECTS and kind.__module__.startswith("flwr."))
        for kind in type(error).__mro__
    )


class Backoff:
    """Waits between tries: doubled each time up to ``longest``, each drawn from its upper half.

    Args:
        first, longest: seconds.
        chance: a number in [0, 1); replaceable for tests.
    """

    def __init__(
        self,
        first: float = 0.5,
        longest: float = 20.0,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._first, self._longest, self._chance = first, longest, chance
        self.tries = 0

    def next(self) -> float:
        """Seconds to wait before the next try."""
        whole = min(self._first * 2.0 ** min(self.tries, 32), self._longest)
        self.tries += 1
        return whole * (0.5 + 0.5 * self._chance())

    def reset(self) -> None:
        """A try went well."""
        self.tries = 0


class StallWatch:
    """Tells of calls that do not come back, from a thread of its own.

    Args:
        seconds: after so many a call counts as stalled.
        tell: takes one line; called once a stalled call, from the watch's thread.
    """

    def __init__(self, seconds: float, tell: Callable[[str], None]) -> None:
        self.seconds, self.tell = seconds, tell
        self._call: tuple[str, float] | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._thread = threading.Thread(target=self._watch, name="flower-geo-stall", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a second call does nothing."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @contextmanager
    def calling(self, what: str) -> Iterator[None]:
        """While the body runs, ``what`` is under way."""
        self._call = (what, time.monotonic())
        try:
            yield
        finally:
            self._call = None

    def _watch(self) -> None:
        told: tuple[str, float] | None = None
        while not self._stop.wait(self.seconds / 4):
            call = self._call
            if call is None or call is told or time.monotonic() - call[1] < self.seconds:
                continue
            told = call
            self.tell(f"the SuperLink has not answered a {call[0]} for {self.seconds:g} s")
