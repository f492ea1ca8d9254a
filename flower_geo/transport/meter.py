"""Bytes of one connection, as a socket would count them.

gRPC does not show its sockets, so what it adds to the frames is reckoned: a prefix of
5 bytes; a header of 9 for each HTTP/2 frame of 16 KiB, two at least; window updates
that whoever takes a message sends back; and what opens a connection.  With TLS there
are 22 bytes more for each 16 KiB, which are left out.
"""

from __future__ import annotations

__all__ = ["Meter"]

_PREFIX, _HEADER, _FRAME = 5, 9, 16_384
#: One update takes 13 bytes; there are between one and two for a message.
_UPDATE = 15
#: Preface, settings, headers and the first pings.
_OPENING = 300


class Meter:
    """Counts the messages of one connection; each count has one thread that writes it."""

    def __init__(self) -> None:
        self._given = self._taken = 0
        self._gave = self._took = 0

    def gave(self, size: int) -> None:
        """A message of so many bytes was sent."""
        self._given += _message(size)
        self._gave += 1

    def took(self, size: int) -> None:
        """A message of so many bytes was received."""
        self._taken += _message(size)
        self._took += 1

    @property
    def sent(self) -> int:
        """Bytes sent."""
        return self._given + _UPDATE * self._took + _OPENING

    @property
    def received(self) -> int:
        """Bytes received."""
        return self._taken + _UPDATE * self._gave + _OPENING


def _message(size: int) -> int:
    return size + _PREFIX + _HEADER * max(2, -(-(size + _PREFIX) // _FRAME))
