"""A site's end of the stream to the cloud's half."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import Future

from flower_geo.calls import Answer, Call
from flower_geo.errors import ConfigError
from flower_geo.messages import Request
from flower_geo.transport import Hello, SplitClient

__all__ = ["SiteStream"]

#: What a ticket holds, all of it text.
_TICKET = ("address", "run", "token", "certificate")


class SiteStream:
    """One request's stream.

    Args:
        request: carries the ticket.
        site: this one's name.
        terms: what the cloud must have alike.
        deadline: seconds that a broken stream, or the others of the round, are waited for.
        visit: come to evaluate only.

    Raises:
        ConfigError: the request carries no ticket that can be read.
    """

    def __init__(
        self,
        request: Request,
        site: str,
        terms: Mapping[str, str],
        deadline: float,
        *,
        visit: bool = False,
    ) -> None:
        ticket = _read(request.stream)
        hello = Hello(
            ticket["run"], site, request.round, 0 if visit else max(request.attempt, 1),
            ticket["token"], dict(terms),
        )  # fmt: skip
        # Longer than the cloud waits for the others, and then begins without them.
        self._client = SplitClient(
            ticket["address"], hello, root_certificate=ticket["certificate"].encode(),
            deadline=2 * deadline,
        )  # fmt: skip

    def join(self, steps: Sequence[int]) -> int:
        """Open a new session; the step that all go on after.

        Raises:
            SplitError: see ``SplitClient.join``.
        """
        return self._client.join(sorted({0, *steps})).step

    def submit(self, call: Call) -> Future[Answer]:
        """See ``SplitClient.submit``."""
        return self._client.submit(call)

    def close(self) -> None:
        """End the session."""
        self._client.close()


def _read(ticket: str) -> dict[str, str]:
    try:
        found = json.loads(ticket)
        return {key: str(found[key]) for key in _TICKET}
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            "the request names no stream to the cloud's half; install the same flower-geo "
            "version at both"
        ) from None
