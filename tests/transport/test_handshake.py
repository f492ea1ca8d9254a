"""Who may join, and what a refusal says."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from flower_geo.calls import Call
from flower_geo.errors import (
    ConfigError,
    DeadlineExceeded,
    HandshakeRefused,
    SplitError,
    TokenRefused,
)
from flower_geo.transport import (
    Hello,
    Joined,
    Limits,
    SplitClient,
    SplitServer,
    check_token,
    issue_token,
    self_signed,
    server_credentials,
)
from tests.integration.relay import Relay
from tests.transport.raw import Raw
from tests.transport.world import QUICK, RUN, SECRET, TERMS, Notes, client, hello, serving, until


def test_a_token_is_of_one_run_site_and_round() -> None:
    token = issue_token(SECRET, RUN, "a", 3, 60)
    check_token(SECRET, token, RUN, "a", 3)
    for run, site, round in (("other", "a", 3), (RUN, "b", 3), (RUN, "a", 4)):
        with pytest.raises(TokenRefused, match="is not one for this run"):
            check_token(SECRET, token, run, site, round)
    with pytest.raises(TokenRefused):
        check_token(b"another secret of 32 bytes......", token, RUN, "a", 3)


@pytest.mark.parametrize(
    "token",
    ["", ".", "x", "1.x", "99999999999.", "99999999999.AAAA", "-1.AAAA", "٣.AAAA", "9" * 5000],
    ids=range(9),
)
def test_no_token(token: str) -> None:
    with pytest.raises(TokenRefused):
        check_token(SECRET, token, RUN, "a", 3)


def test_every_letter_of_a_token_counts() -> None:
    token = issue_token(SECRET, RUN, "a", 3, 60)
    for place, letter in enumerate(token[:-1]):  # the last one's low bits stand for nothing
        other = "1" if letter != "1" else "2"
        with pytest.raises(TokenRefused):
            check_token(SECRET, token[:place] + other + token[place + 1 :], RUN, "a", 3)


def test_a_token_grows_old() -> None:
    token = issue_token(SECRET, RUN, "a", 3, -1)
    with pytest.raises(TokenRefused, match="too old"):
        check_token(SECRET, token, RUN, "a", 3)
    check_token(SECRET, token, RUN, "a", 3, expired=True)


def test_a_short_secret_is_none() -> None:
    with pytest.raises(ConfigError, match="secret"):
        issue_token(b"short", RUN, "a", 1, 60)


def refused(address: str, **changes: Any) -> SplitError:
    with client(address, **changes) as site:
        began = time.monotonic()
        with pytest.raises(SplitError) as caught:
            site.join()
        assert time.monotonic() - began < 5
        with pytest.raises(SplitError):
            site.submit(Call("step", 1))
    assert "\n" not in str(caught.value)
    return caught.value


def test_terms_are_refused_by_name() -> None:
    notes = Notes()
    with serving(notes) as (server, address):
        terms = {"model": "sha256:2", "cut": "2", "dtype": "bf16"}
        error = refused(address, terms=terms)
        assert isinstance(error, HandshakeRefused)
        assert error.terms == ("codecs", "dtype", "model")
        assert "model: the cloud has 'sha256:1', the site 'sha256:2'" in str(error)
        assert "dtype: the cloud has none, the site 'bf16'" in str(error)
        assert (error.retry, error.fault) == (False, "site")
        error = refused(address, run="another")
        assert isinstance(error, HandshakeRefused)
        assert error.terms == ("run",)
        assert server.stats().refused == {"HandshakeRefused": 2}
    assert notes.joins == []


def test_tokens_are_refused() -> None:
    with serving(Notes()) as (_, address):
        wrong = issue_token(SECRET, RUN, "b", 1, 60)
        assert isinstance(refused(address, token=wrong), TokenRefused)
        old = issue_token(SECRET, RUN, "a", 1, -5)
        error = refused(address, token=old)
        assert isinstance(error, TokenRefused)
        assert (error.retry, error.fault) == (False, "site")
        # nothing is said about the terms to whom has no token
        assert "model" not in str(refused(address, token=wrong, terms={}))


class Refusing(Notes):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def join(self, hello: Hello) -> Joined:
        raise self.error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (HandshakeRefused("round 1 is over", fault="cloud"), "round 1 is over"),
        (ConfigError("bad\nthing"), "could not let it in: bad thing"),
        (ZeroDivisionError("x"), "could not let it in"),
    ],
    ids=["typed", "ours", "any"],
)
def test_the_handler_refuses(error: Exception, words: str) -> None:
    with serving(Refusing(error)) as (_, address):
        met = refused(address)
        assert isinstance(met, HandshakeRefused)
        assert words in str(met)
        assert met.fault == "cloud"


class Slow(Notes):
    """Lets a site in once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.free = threading.Event()

    def join(self, hello: Hello) -> Joined:
        joined = super().join(hello)
        self.free.wait(20)
        return joined


def test_a_join_may_take_its_time() -> None:
    limits = Limits(beat=0.1, silence=0.5, greeting=0.3)
    slow = Slow()
    with serving(slow, limits) as (_, address), client(address, limits=limits) as site:
        timer = threading.Timer(1.5, slow.free.set)
        timer.start()
        began = time.monotonic()
        assert site.join() == Joined(7, 0)
        assert time.monotonic() - began > 1.4
        assert site.submit(Call("step", 1)).result(5).meta["step"] == 1
        assert site.stats().connections == 1
        timer.join()
    assert len(slow.joins) == 1


def test_a_join_has_a_deadline_and_the_next_supersedes_it() -> None:
    slow = Slow()
    with serving(slow) as (server, address):
        with client(address, deadline=0.3) as site, pytest.raises(DeadlineExceeded) as caught:
            site.join()
        assert caught.value.retry
        with client(address) as site:
            joined: list[Joined] = []
            thread = threading.Thread(target=lambda: joined.append(site.join()))
            thread.start()
            slow.free.set()
            thread.join(10)
            assert joined == [Joined(7, 0)]
            assert site.submit(Call("step", 1)).result(5).meta["step"] == 1
            assert server.stats().sessions == 1
    assert len(slow.joins) == 2


def test_a_line_that_breaks_during_a_join_does_not_begin_another() -> None:
    slow = Slow()
    with serving(slow) as (server, address), Relay(address) as relay:
        with client(relay.address) as site:
            joined: list[Joined] = []
            thread = threading.Thread(target=lambda: joined.append(site.join()))
            thread.start()
            until(lambda: slow.joins)
            relay.reset()
            until(lambda: site.stats().connections == 2 and server.stats().streams == 1)
            relay.reset()
            until(lambda: site.stats().connections == 3 and server.stats().streams == 1)
            slow.free.set()
            thread.join(10)
            assert joined == [Joined(7, 0)]
            assert site.submit(Call("step", 1)).result(5).meta["step"] == 1
    assert len(slow.joins) == 1


def test_a_site_cannot_fill_the_server_while_it_waits() -> None:
    slow = Slow()
    with serving(slow) as (server, address), ExitStack() as stack:
        streams = [stack.enter_context(Raw(address)) for _ in range(5)]
        for raw in streams[:4]:
            raw.send(raw.opening())
            until(lambda: slow.joins)
        until(lambda: len(server._doors) == 4)
        refusal = streams[4].greet().refusal
        assert "is being let in already" in refusal.message
        assert refusal.retry
        for raw in streams[:3]:
            raw.__exit__(None, None, None)
        until(lambda: server.stats().streams == 1)
        slow.free.set()  # the first is in, the next two are gone, and the fourth is the last
        assert streams[3].take().HasField("welcome")
        until(lambda: not server._doors)
        assert len(slow.joins) == 2


def test_nothing_of_the_session_before_comes_once_a_site_joins_anew() -> None:
    held, order = threading.Event(), []

    class Noting(Notes):
        def join(self, hello: Hello) -> Joined:
            order.append("join")
            return super().join(hello)

        def serve(self, site: str, call: Call, answer: Any) -> None:
            order.append("serve")
            held.wait(10)
            order.append("served")

    with serving(Noting()) as (_, address), client(address) as one, client(address) as two:
        one.join()
        one.submit(Call("step", 1))
        until(lambda: len(order) == 2)
        timer = threading.Timer(0.3, held.set)
        timer.start()
        two.join()
        timer.join()
    assert order == ["join", "serve", "served", "join"]


def test_no_server_is_waited_for_within_the_deadline() -> None:
    with serving(Notes()) as (_, address):
        pass
    with client(address, deadline=0.5) as site:
        with pytest.raises(DeadlineExceeded, match=r"127\.0\.0\.1") as caught:
            site.join()
        assert (caught.value.retry, caught.value.fault) == (True, "network")


def test_a_server_that_comes_late_is_found() -> None:
    with serving(Notes()) as (_, address):
        pass
    with client(address) as site:
        joined: list[Joined] = []
        thread = threading.Thread(target=lambda: joined.append(site.join()))
        thread.start()
        time.sleep(0.3)
        with serving(Notes(), address=address):
            thread.join(10)
            assert joined == [Joined(7, 0)]
            site.close()


def test_a_full_server_says_so_and_takes_who_comes_when_there_is_room() -> None:
    limits = Limits(sessions=1)
    with serving(Notes(), limits) as (_, address), client(address, "a") as one:
        one.join()
        with client(address, "b", deadline=0.5) as two, pytest.raises(SplitError, match="no more"):
            two.join()
        with client(address, "b") as two:
            thread = threading.Timer(0.3, one.close)
            thread.start()
            two.join()
            thread.join()


def test_credits_of_all_sessions_are_bounded() -> None:
    limits = Limits(bytes=1000, total=1500)
    with serving(Notes(), limits) as (_, address), client(address, "a") as one:
        one.join()
        with client(address, "b", deadline=0.3) as two, pytest.raises(SplitError, match="no more"):
            two.join()


def test_an_address_that_is_taken_is_named() -> None:
    with serving(Notes()) as (_, address):
        server = SplitServer(Notes(), secret=SECRET, run=RUN, terms=TERMS, address=address)
        with pytest.raises(ConfigError, match=address):
            server.start()


def test_tls() -> None:
    certificate, key = self_signed(["127.0.0.1", "localhost"])
    other, _ = self_signed(["127.0.0.1"])
    secure = server_credentials(certificate, key)
    with serving(Notes(), credentials=secure) as (_, address):
        with client(address, root_certificate=certificate) as site:
            site.join()
            assert site.submit(Call("step", 1)).result(5).meta["step"] == 1
        error = refused(address, root_certificate=other)
        assert isinstance(error, HandshakeRefused)
        assert "certificate" in str(error)
        with client(address, deadline=0.5) as site, pytest.raises(DeadlineExceeded):
            site.join()  # without encryption
        with SplitClient(
            address.replace("127.0.0.1", "localhost"), hello(), limits=QUICK,
            root_certificate=certificate, deadline=10,
        ) as site:  # fmt: skip
            site.join()


def test_a_token_is_not_shown() -> None:
    assert hello().token not in repr(hello())
