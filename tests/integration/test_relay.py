"""The relay does what chaos relies on."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.integration.relay import Relay


@pytest.fixture
def relay() -> Iterator[Relay]:
    """A relay before a server that sends everything back."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        threads: list[threading.Thread] = []

        def echo(peer: socket.socket) -> None:
            with peer:
                try:
                    while piece := peer.recv(1 << 16):
                        peer.sendall(piece)
                except OSError:
                    pass

        def serve() -> None:
            while True:
                try:
                    peer, _ = server.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=echo, args=(peer,)))
                threads[-1].start()

        accepting = threading.Thread(target=serve)
        accepting.start()
        with Relay(f"127.0.0.1:{server.getsockname()[1]}") as made:
            yield made
        server.shutdown(socket.SHUT_RDWR)
        accepting.join(5)
        for thread in threads:
            thread.join(5)
            assert not thread.is_alive()


def _dial(relay: Relay) -> socket.socket:
    host, _, port = relay.address.rpartition(":")
    made = socket.create_connection((host, int(port)))
    made.settimeout(5)
    return made


def _back(peer: socket.socket, data: bytes) -> bytes:
    peer.sendall(data)
    found = b""
    while len(found) < len(data):
        piece = peer.recv(1 << 16)
        if not piece:
            break
        found += piece
    return found


def test_it_passes_on_and_counts(relay: Relay) -> None:
    with _dial(relay) as peer:
        assert _back(peer, b"x" * 5000) == b"x" * 5000
    assert relay.up == 5000
    assert relay.down == 5000


def test_a_reset_is_one_for_the_peer_and_the_next_connection_works(relay: Relay) -> None:
    with _dial(relay) as peer:
        assert _back(peer, b"a") == b"a"
        relay.reset()
        with pytest.raises(ConnectionResetError):
            peer.recv(1)
    with _dial(relay) as peer:
        assert _back(peer, b"b") == b"b"


def test_a_cut_line_is_refused_until_mended(relay: Relay) -> None:
    with _dial(relay) as peer:
        assert _back(peer, b"a") == b"a"
        relay.cut()
        assert peer.recv(1) == b""
    with _dial(relay) as peer:
        assert peer.recv(1) == b""
    relay.mend()
    with _dial(relay) as peer:
        assert _back(peer, b"b") == b"b"


def test_a_black_hole_swallows_and_gives_back(relay: Relay) -> None:
    with _dial(relay) as peer:
        relay.blackhole()
        peer.sendall(b"a")
        peer.settimeout(0.3)
        with pytest.raises(TimeoutError):
            peer.recv(1)
        relay.mend()
        peer.settimeout(5)
        assert peer.recv(1) == b"a"


def test_a_slow_line_keeps_its_rate(relay: Relay) -> None:
    relay.slow(rate=40_000)
    with _dial(relay) as peer:
        began = time.monotonic()
        assert len(_back(peer, b"x" * 20_000)) == 20_000
        assert time.monotonic() - began > 0.45


def _pumped(relay: Relay, data: bytes) -> float:
    """Seconds until all of it is back, sent without waiting for what comes."""
    with _dial(relay) as peer:
        began = time.monotonic()
        sender = threading.Thread(target=peer.sendall, args=(data,))
        sender.start()
        found = 0
        while found < len(data):
            found += len(peer.recv(1 << 16))
        sender.join(5)
        return time.monotonic() - began


def test_a_delay_is_a_wait_and_no_loss_of_throughput(relay: Relay) -> None:
    relay.slow(delay=0.1)
    with _dial(relay) as peer:
        began = time.monotonic()
        assert _back(peer, b"a") == b"a"
        assert 0.2 <= time.monotonic() - began < 0.6
    # 128 pieces each way: one after another they would take more than 12 s.
    assert 0.2 <= _pumped(relay, b"x" * (128 << 16)) < 4.0


def test_a_delay_adds_to_a_rate_once(relay: Relay) -> None:
    relay.slow(delay=0.1, rate=100_000)
    assert 0.65 < _pumped(relay, b"x" * 50_000) < 2.0
