"""The site's end."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Self

from flower_geo.calls import Answer, Call
from flower_geo.errors import SessionLost, SplitError
from flower_geo.transport.hello import Hello, Joined
from flower_geo.transport.limits import Limits, LinkStats
from flower_geo.transport.link import Link

__all__ = ["SplitClient"]


class SplitClient:
    """Talks to one ``SplitServer``, over one stream that this side opens.

    Args:
        address: ``host:port``.
        hello: who this is and what it would train.
        limits: bounds and times of this side.
        root_certificate: certificate to trust, PEM; None for no encryption.
        deadline: seconds to go on without a connection: in ``join``, and later
            whenever one breaks.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        *,
        limits: Limits | None = None,
        root_certificate: bytes | None = None,
        deadline: float = 60.0,
    ) -> None:
        self._address, self._root = address, root_certificate
        self._hello = replace(hello, deadline=deadline)
        self._limits = limits or Limits()
        self._lock = threading.Lock()
        self._link: Link | None = None

    def join(self, steps: Sequence[int] = (0,)) -> Joined:
        """Begin a new session; one that is open ends, and its calls fail with it.

        Args:
            steps: steps of the round that this site can go on from; 0 is always one.

        Raises:
            HandshakeRefused, TokenRefused: not let in; the message says why.
            DeadlineExceeded: not let in within the deadline.
        """
        with self._lock:
            if self._link is not None:
                self._link.close(farewell=False)
            hello = replace(self._hello, steps=tuple(sorted({0, *steps})))
            link = self._link = Link(self._address, hello, self._limits, self._root)
        try:
            return link.joined()
        except SplitError:
            link.close(farewell=False)
            raise

    def submit(self, call: Call) -> Future[Answer]:
        """Send a call, in order; blocks while credits are out.

        A connection that breaks is opened again and the session taken up where it
        was; the future does not see that.  It fails with ``SessionLost`` (join anew),
        ``DeadlineExceeded`` or ``CallFailed``.

        Raises:
            SplitError: the session is over, or the call is larger than the cloud takes.
        """
        link = self._link
        if link is None:
            raise SessionLost("there is no session yet; join first")
        return link.submit(call)

    def close(self) -> None:
        """End the session and tell the cloud, if it can be reached now."""
        with self._lock:
            if self._link is not None:
                self._link.close()

    def stats(self) -> LinkStats:
        """What the present session has counted."""
        link = self._link
        return LinkStats() if link is None else link.stats()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
