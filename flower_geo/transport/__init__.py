"""The stream between the halves of a split model: gRPC, opened by the site.

It carries ``flower_geo.calls`` and knows nothing of training.  Every call is run
once, whatever happens to the connection.
"""

from __future__ import annotations

from flower_geo.transport.client import SplitClient
from flower_geo.transport.hello import PROTOCOL, Hello, Joined
from flower_geo.transport.limits import Limits, LinkStats, Stats
from flower_geo.transport.server import SplitServer
from flower_geo.transport.session import Handler
from flower_geo.transport.tls import self_signed, server_credentials
from flower_geo.transport.token import check_token, issue_token

__all__ = [
    "PROTOCOL",
    "Handler",
    "Hello",
    "Joined",
    "Limits",
    "LinkStats",
    "SplitClient",
    "SplitServer",
    "Stats",
    "check_token",
    "issue_token",
    "self_signed",
    "server_credentials",
]
