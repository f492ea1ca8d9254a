"""Sixteen sites at once, lines that all break together, and what was counted."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import ExitStack

import pytest

from flower_geo.calls import Answer, Call
from flower_geo.transport import Limits, LinkStats, SplitClient, self_signed, server_credentials
from tests.integration.relay import Relay
from tests.transport.cutter import Cutter
from tests.transport.world import Notes, client, serving, until

SITES = [f"site-{n:02}" for n in range(16)]
LIMITS = Limits(chunk=4096, beat=5.0, silence=30.0, call=60.0)


def call(site: str, step: int) -> Call:
    """Another blob for each site and step."""
    return Call("forward", step, 0, {"by": site}, {"x": f"{site}/{step}".encode() * 900})


def work(site: SplitClient, name: str, steps: int, found: dict[str, list[Answer]]) -> None:
    """As many calls at once as there are credits."""
    site.join()
    futures = [site.submit(call(name, step)) for step in range(1, steps + 1)]
    found[name] = [future.result(30) for future in futures]


def test_sixteen_sites_over_a_line_that_breaks_again_and_again() -> None:
    steps, notes = 30, Notes()
    found: dict[str, list[Answer]] = {}
    with serving(notes, LIMITS) as (server, address), Relay(address) as relay, ExitStack() as stack:
        relay.slow(delay=0.002)
        sites = {n: stack.enter_context(client(relay.address, n, LIMITS)) for n in SITES}
        threads = [
            threading.Thread(target=work, args=(site, name, steps, found))
            for name, site in sites.items()
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)
            relay.reset()
        for thread in threads:
            thread.join()
        counted = server.stats().sites
        assert sum(each.connections for each in counted.values()) > 2 * len(SITES)
        assert {n: (each.calls, each.answers) for n, each in counted.items()} == dict.fromkeys(
            SITES, (steps, steps)
        )
        relay.mend()
    for name in SITES:
        blobs = [bytes(answer.blobs["x"])[::-1] for answer in found[name]]
        assert blobs == [call(name, step).blobs["x"] for step in range(1, steps + 1)]
    assert Counter(notes.calls) == Counter(
        (name, "forward", step, 0) for name in SITES for step in range(1, steps + 1)
    )
    for name in SITES:
        assert [each[2] for each in notes.calls if each[0] == name] == list(range(1, steps + 1))


def test_sixteen_sites_are_back_within_two_seconds() -> None:
    with serving(Notes(), LIMITS) as (server, address), Relay(address) as relay:
        with ExitStack() as stack:
            sites = [stack.enter_context(client(relay.address, n, LIMITS)) for n in SITES]
            for site in sites:
                site.join()
            for _ in range(3):
                relay.reset()
                began = time.monotonic()
                futures = [site.submit(Call("step", 1)) for site in sites]
                assert all(future.result(10).meta for future in futures)
                assert time.monotonic() - began < 2.0
            assert server.stats().sessions == len(SITES)
            assert all(site.stats().connections == 4 for site in sites)


def near(counted: int, measured: int) -> None:
    assert abs(counted - measured) <= 0.02 * measured, (counted, measured)


@pytest.mark.parametrize(
    ("size", "count"), [(300_000, 30), (20_000, 100)], ids=["large-blobs", "small-blobs"]
)
@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_bytes_counted_are_those_of_the_socket(size: int, count: int, secure: bool) -> None:
    limits = Limits(beat=5.0, silence=30.0)
    certificate, key = self_signed(["127.0.0.1"])
    options = {"credentials": server_credentials(certificate, key)} if secure else {}
    with serving(Notes(), limits, **options) as (server, address), Relay(address) as relay:
        trusted = certificate if secure else None
        with client(relay.address, limits=limits, root_certificate=trusted) as site:
            site.join()
            blobs = [step.to_bytes(4, "little") * (size // 4) for step in range(count)]
            calls = [Call("forward", step, 0, {}, {"x": x}) for step, x in enumerate(blobs)]
            for future in [site.submit(each) for each in calls]:
                future.result(30)
        mine = site.stats()
        until(lambda: server.stats().streams == 0)
        there = server.stats().sites["a"]
        near(mine.sent, relay.up)
        near(mine.received, relay.down)
        near(there.received, relay.up)
        near(there.sent, relay.down)
        assert mine == LinkStats(mine.sent, mine.received, count, count, 1)
        assert (there.calls, there.answers, there.connections) == (count, count, 1)


def test_a_line_that_is_cut_after_a_minute_of_silence() -> None:
    # the figures are a hundredth of the real ones: beats of 0.1 s, a line that dies after 0.6 s
    limits = Limits(beat=0.1, silence=1.0)
    with serving(Notes(), limits) as (_, address), Cutter(address, idle=0.6) as relay:
        with client(relay.address, limits=limits) as site:
            site.join()
            time.sleep(2.0)
            assert site.submit(Call("step", 1)).result(5).meta["step"] == 1
            assert relay.connections == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_times_as_they_are_live_through_a_line_that_drops_after_a_minute() -> None:
    # long enough for several pings of HTTP/2, which the server must not find too many
    with serving(Notes(), Limits()) as (_, address), Cutter(address, idle=60.0) as relay:
        with client(relay.address, limits=Limits()) as site:
            site.join()
            time.sleep(200)
            assert site.submit(Call("step", 1)).result(5).meta["step"] == 1
            assert relay.connections == 1
