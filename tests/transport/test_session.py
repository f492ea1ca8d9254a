"""What outlives a connection, what ends a session, and what both sides do then."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from flower_geo.calls import Answer, Call
from flower_geo.errors import CallFailed, DeadlineExceeded, SessionLost, SplitError
from flower_geo.transport import Joined, Limits, SplitServer, issue_token
from tests.integration.relay import Relay
from tests.transport.world import QUICK, RUN, SECRET, Notes, client, serving, until

STEP = Call("step", 1)
#: Beats of tenths of seconds: what is silent is noticed within a second.
LIVELY = Limits(chunk=1024, beat=0.1, silence=0.6, greeting=2.0, call=20.0, linger=5.0)


class Parked(Notes):
    """Answers when it is told to, in the order it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.parked: dict[int, Callable[[Answer | SplitError], None]] = {}

    def serve(self, site: str, call: Call, answer: Callable[[Answer | SplitError], None]) -> None:
        self.calls.append((site, call.kind, call.step, call.micro))
        self.parked[call.step] = answer

    def say(self, step: int) -> None:
        self.parked[step](Answer({"step": step}))


def lost(future: Future[Answer]) -> SessionLost:
    with pytest.raises(SessionLost, match="join anew") as caught:
        future.result(5)
    assert caught.value.retry
    return caught.value


def test_dropped_sites_join_anew() -> None:
    parked = Parked()
    with serving(parked) as (server, address), client(address) as a, client(address, "b") as b:
        a.join()
        b.join()
        futures = [a.submit(STEP), b.submit(Call("step", 2))]
        until(lambda: len(parked.parked) == 2)
        server.drop("a", "nobody")
        assert parked.left == ["a"]
        assert "has dropped site 'a'" in str(lost(futures[0]))
        with pytest.raises(SessionLost):
            a.submit(STEP)
        parked.say(1)  # to no one
        parked.say(2)
        assert futures[1].result(5).meta == {"step": 2}
        parked.epoch = 8
        assert a.join((0, 3)) == Joined(8, 3)
        again = a.submit(Call("step", 4))
        until(lambda: 4 in parked.parked)
        parked.say(4)
        assert again.result(5).meta == {"step": 4}
    assert parked.left == ["a", "b", "a"] or parked.left == ["a", "a", "b"]


def test_joining_again_ends_the_session_before_without_a_goodbye() -> None:
    parked = Parked()
    with serving(parked) as (_, address), client(address) as site:
        site.join()
        future = site.submit(STEP)
        until(lambda: parked.parked)
        assert site.join((0, 1)) == Joined(7, 1)
        with pytest.raises(SessionLost):
            future.result(5)
        parked.say(1)
        assert parked.left == []
        with client(address) as other:  # the same site, started again elsewhere
            other.join()
            until(lambda: isinstance(_failure(site.submit), SessionLost))
    assert parked.left == ["a"]


def _failure(submit: Callable[[Call], Future[Answer]]) -> BaseException | None:
    try:
        return submit(STEP).exception(0.5)
    except (SplitError, TimeoutError) as error:
        return error


def test_a_stopped_server_says_so() -> None:
    parked = Parked()
    with serving(parked) as (server, address), client(address) as site:
        site.join()
        future = site.submit(STEP)
        until(lambda: parked.parked)
        server.stop(1.0)
        assert "was stopped" in str(lost(future))
        assert parked.left == []


def test_an_old_session_is_unknown_to_another_server() -> None:
    with serving(Parked()) as (server, address), Relay(address) as relay:
        with client(relay.address) as site:
            site.join()
            future = site.submit(STEP)
            relay.cut()
            until(lambda: server.stats().streams == 0)
            with serving(Notes()) as (_, other):
                host, _, port = other.rpartition(":")
                relay.target = (host, int(port))
                relay.mend()
                assert "does not know this session" in str(lost(future))


def test_a_line_that_was_away_is_taken_up_again() -> None:
    parked = Parked()
    with serving(parked) as (server, address), Relay(address) as relay:
        with client(relay.address) as site:
            site.join()
            futures = [site.submit(Call("step", n)) for n in (1, 2, 3)]
            until(lambda: len(parked.parked) == 3)
            relay.cut()
            until(lambda: server.stats().streams == 0)
            parked.say(2)  # while nobody listens, and not in order
            futures.append(site.submit(Call("step", 4)))
            relay.mend()
            assert futures[1].result(5).meta == {"step": 2}
            until(lambda: 4 in parked.parked)
            for step in (4, 1, 3):
                parked.say(step)
            assert [f.result(5).meta["step"] for f in futures] == [1, 2, 3, 4]
            assert server.stats().sites["a"].connections == 2
    assert [step for _, _, step, _ in parked.calls] == [1, 2, 3, 4]


def test_an_answer_that_has_arrived_is_not_sent_again() -> None:
    parked = Parked()
    with serving(parked) as (server, address), Relay(address) as relay:
        with client(relay.address) as site:
            site.join()
            futures = [site.submit(Call("step", n)) for n in (1, 2, 3)]
            until(lambda: len(parked.parked) == 3)
            parked.parked[3](Answer({"step": 3}, {"x": b"x" * 50_000}))
            assert futures[2].result(5).blobs == {"x": b"x" * 50_000}
            relay.reset()
            until(lambda: server.stats().sites["a"].connections == 2)
            parked.say(1)
            parked.say(2)
            assert [f.result(5).meta["step"] for f in futures] == [1, 2, 3]
            assert site.stats().received < 60_000
            (session,) = server._sessions.values()
            until(lambda: session.acknowledged == 3)


def test_a_black_hole_is_noticed_by_both_sides() -> None:
    notes = Notes()
    with serving(notes, LIVELY) as (server, address), Relay(address) as relay:
        with client(relay.address, limits=LIVELY) as site:
            site.join()
            assert site.submit(STEP).result(5).meta["step"] == 1
            relay.blackhole()
            future = site.submit(Call("step", 2))
            until(lambda: server.stats().streams == 0)
            until(lambda: site.stats().connections >= 2)
            relay.mend()
            assert future.result(5).meta["step"] == 2
    assert [step for _, _, step, _ in notes.calls] == [1, 2]


def test_beats_keep_an_idle_session_up() -> None:
    with serving(Notes(), LIVELY) as (server, address):
        with client(address, limits=LIVELY) as site:
            site.join()
            time.sleep(3 * LIVELY.silence)
            assert site.submit(STEP).result(5).meta["step"] == 1
            assert server.stats().sites["a"].connections == 1


def test_a_site_that_stays_away_is_gone() -> None:
    limits = Limits(beat=0.1, silence=0.3, linger=0.5)
    parked = Parked()
    with serving(parked, limits) as (server, address), Relay(address) as relay:
        with client(relay.address, limits=limits, deadline=20.0) as site:
            site.join()
            future = site.submit(STEP)
            until(lambda: parked.parked)
            relay.cut()
            until(lambda: parked.left == ["a"])
            assert server.stats().sessions == 0
            relay.mend()
            lost(future)


def test_a_line_that_stays_down_ends_the_session_at_the_deadline() -> None:
    with serving(Parked()) as (_, address), Relay(address) as relay:
        with client(relay.address, deadline=0.6) as site:
            site.join()
            time.sleep(0.8)  # a line that is up has no deadline
            future = site.submit(STEP)
            began = time.monotonic()
            relay.cut()
            with pytest.raises(DeadlineExceeded, match=r"no connection to .* for 0\.6 s") as caught:
                future.result(5)
            assert 0.4 < time.monotonic() - began < 3
            assert (caught.value.retry, caught.value.fault) == (True, "network")
            relay.mend()
            site.join()
            site.close()


def test_a_session_outlives_its_token() -> None:
    notes = Notes()
    token = issue_token(SECRET, RUN, "a", 1, 1.0)
    with serving(notes) as (server, address), Relay(address) as relay:
        with client(relay.address, token=token) as site:
            site.join()
            time.sleep(2.1)
            relay.reset()
            assert site.submit(STEP).result(5).meta["step"] == 1
            assert server.stats().sites["a"].connections == 2


def test_a_call_has_a_deadline_and_the_session_goes_on() -> None:
    limits = Limits(call=0.4, in_flight=2)
    parked = Parked()
    with serving(parked) as (_, address), client(address, limits=limits) as site:
        site.join()
        with pytest.raises(DeadlineExceeded, match=r"call 1 \(step\)") as caught:
            site.submit(STEP).result(5)
        assert caught.value.fault == "cloud"
        future = site.submit(Call("step", 2))
        until(lambda: len(parked.parked) == 2)
        parked.say(1)  # too late: nobody waits for it
        parked.say(2)
        assert future.result(5).meta == {"step": 2}


def test_submit_waits_for_credit() -> None:
    limits = Limits(in_flight=2, bytes=1000)
    parked = Parked()
    with serving(parked, limits) as (_, address):
        with client(address, limits=Limits(call=1.0)) as site:
            site.join()
            futures = [site.submit(Call("step", n)) for n in (1, 2)]
            with pytest.raises(DeadlineExceeded, match="no earlier call"):
                site.submit(Call("step", 3))
            for future in futures:
                with pytest.raises(DeadlineExceeded):
                    future.result(1)
            until(lambda: len(parked.parked) == 2)
            parked.say(1)
            third = site.submit(Call("step", 4, 0, {}, {"x": b"x" * 600}))
            parked.say(2)
            timer = threading.Timer(0.3, lambda: parked.say(4))
            timer.start()
            fourth = site.submit(Call("step", 5, 0, {}, {"x": b"x" * 600}))  # 1200 bytes
            assert third.done()
            until(lambda: 5 in parked.parked)
            parked.say(5)
            assert fourth.result(2).meta == {"step": 5}
            timer.join()


def test_a_handler_that_fails_fails_one_call() -> None:
    def make(site: str, call: Call) -> Answer:
        if call.step == 1:
            raise ZeroDivisionError("by zero\nat all")
        return Answer({"x": call.step})

    with serving(Notes(make)) as (_, address), client(address) as site:
        site.join()
        futures = [site.submit(Call("step", n)) for n in (1, 2)]
        with pytest.raises(CallFailed, match="call 1 failed: ZeroDivisionError: by zero at all"):
            futures[0].result(5)
        assert futures[1].result(5).meta == {"x": 2}


def test_a_second_word_to_a_call_is_not_heard() -> None:
    parked = Parked()
    with serving(parked) as (_, address), client(address) as site:
        site.join()
        first = site.submit(STEP)
        until(lambda: parked.parked)
        parked.say(1)
        parked.parked[1](Answer({"other": True}))
        assert first.result(5).meta == {"step": 1}
        second = site.submit(Call("step", 2))
        until(lambda: 2 in parked.parked)
        parked.say(2)
        assert second.result(5).meta == {"step": 2}


def test_answers_that_have_arrived_are_forgotten() -> None:
    with serving(Notes()) as (server, address), client(address) as site:
        site.join()
        for number in range(20):
            site.submit(Call("step", number)).result(5)
        (session,) = server._sessions.values()
        until(lambda: not session._open)
        assert session.acknowledged == 20


def test_nothing_is_left_behind() -> None:
    before = {thread.ident for thread in threading.enumerate()}
    with serving(Notes()) as (_, address):
        sites = [client(address, name) for name in "abc"]
        for site in sites:
            site.join()
            site.submit(STEP).result(5)
        for site in sites[:2]:
            site.close()
            site.close()
    sites[2].close()
    until(lambda: not {t.ident for t in threading.enumerate()} - before)


def test_a_server_can_be_stopped_before_it_starts() -> None:
    SplitServer(Notes(), secret=SECRET, run=RUN, terms={}, limits=QUICK).stop(0.1)
