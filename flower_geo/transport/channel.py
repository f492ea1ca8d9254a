"""How gRPC is set up at both ends.

Times are for lines that drop a connection after a minute of silence: HTTP/2 pings
go every 30 s while a stream is open, beside the beats on the stream.  The server
allows them (its shortest allowed interval is 10 s), so that no one is thrown out
for pinging too often.
"""

from __future__ import annotations

import grpc

from flower_geo.transport.limits import MAX_FRAME

__all__ = ["METHOD", "SERVICE", "dial", "server_options"]

SERVICE, METHOD = "flower_geo.v1.Split", "Exchange"
_COMMON = [
    ("grpc.max_receive_message_length", MAX_FRAME),
    ("grpc.max_send_message_length", MAX_FRAME),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
]


def server_options(streams: int) -> list[tuple[str, int]]:
    """Options of a server; ``streams`` is how many one connection may have open."""
    return [
        *_COMMON,
        ("grpc.max_concurrent_streams", streams),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.so_reuseport", 0),  # a second server on the port fails, instead of sharing it
    ]


def dial(address: str, root_certificate: bytes | None) -> grpc.Channel:
    """A connection of its own; without a certificate to trust it is not encrypted."""
    options = [
        *_COMMON,
        # one connection for each channel, and none of another's waits before the next try
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
    ]
    if root_certificate is None:
        return grpc.insecure_channel(address, options)
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(root_certificate), options)
