"""Pulls of replies beside each other, as one of them may take minutes.

Flower gives a reply out before its tensors are uploaded, and a pull waits for all of
them: as long as a slow line takes, or three minutes where the site died meanwhile.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Generic, TypeVar

__all__ = ["Pulls"]

_T = TypeVar("_T")


class Pulls(Generic[_T]):
    """Calls that are waited for a moment, and gone on without where they take longer.

    Args:
        call: pulls one message; runs in another thread.
        most: calls under way at once, and so replies in memory.
        patience: seconds a call is waited for.
    """

    def __init__(self, call: Callable[[str], _T], most: int = 4, patience: float = 1.0) -> None:
        self._call = call
        self.most = most
        self.patience = patience
        self._pool: ThreadPoolExecutor | None = None
        self._under_way: dict[str, Future[_T]] = {}

    @property
    def busy(self) -> int:
        """How many have not ended."""
        return sum(not pulled.done() for pulled in self._under_way.values())

    @property
    def full(self) -> bool:
        """Whether as many are under way as may be."""
        return len(self._under_way) >= self.most

    def asked(self, key: str) -> bool:
        """Whether a pull of this message is under way."""
        return key in self._under_way

    def ask(self, key: str) -> Future[_T] | None:
        """Pull one message: how it ended, or None where it goes on beside the others."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(thread_name_prefix="flower-geo-pull")
        # Flower reads who it is from the caller's context.
        pulled = self._pool.submit(contextvars.copy_context().run, self._call, key)
        wait([pulled], self.patience)
        if pulled.done():
            return pulled
        self._under_way[key] = pulled
        return None

    def ended(self) -> list[tuple[str, Future[_T]]]:
        """Those that went on and have ended since the last call."""
        found = [(key, pulled) for key, pulled in self._under_way.items() if pulled.done()]
        for key, _ in found:
            del self._under_way[key]
        return found

    def close(self) -> None:
        """Begin no more; what is under way is nobody's any longer."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None
        self._under_way.clear()
