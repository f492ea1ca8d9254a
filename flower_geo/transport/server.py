"""The cloud's end: takes streams in, keeps sessions, and bounds both."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc

from flower_geo.errors import ConfigError, FlowerGeoError, HandshakeRefused, SplitError
from flower_geo.transport.channel import METHOD, SERVICE, server_options
from flower_geo.transport.hello import Hello, check_terms, read_hello
from flower_geo.transport.limits import Limits, LinkStats, Stats
from flower_geo.transport.session import Handler, Session, lost
from flower_geo.transport.spool import Store
from flower_geo.transport.stream import Stream
from flower_geo.transport.token import check_token

__all__ = ["SplitServer"]

#: Keys of ended sessions that are remembered, so that none of them begins anew.
MAX_ENDED = 4096
#: Times a site may be waiting to be let in: it was started again while it waited.
MAX_DOORS = 4


class _Door:
    """A session that is about to begin: who comes with the same key waits for the same."""

    def __init__(self, site: str) -> None:
        self.site, self.open = site, threading.Event()
        self.session: Session | None = None
        self.error: SplitError | None = None


class SplitServer:
    """Serves the sites of one run.

    Args:
        handler: who serves the calls.
        secret: what tokens are signed with, see ``issue_token``.
        run: name of the run.
        terms: what every site must agree on, by name.
        limits: bounds and times.
        address: ``host:port`` to listen on; port 0 takes a free one.
        credentials: from ``server_credentials``; None for no encryption.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        secret: bytes,
        run: str,
        terms: Mapping[str, str],
        limits: Limits | None = None,
        address: str = "127.0.0.1:0",
        credentials: grpc.ServerCredentials | None = None,
    ) -> None:
        self.handler, self.run, self.terms = handler, run, dict(terms)
        self.limits = limits or Limits()
        self.store = Store(self.limits)
        self._secret, self._address, self._credentials = secret, address, credentials
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._sessions: dict[bytes, Session] = {}
        self._latest: dict[str, Session] = {}
        self._doors: dict[bytes, _Door] = {}
        self._steps: dict[str, threading.Lock] = {}
        self._ended: deque[bytes] = deque(maxlen=MAX_ENDED)
        self._past: dict[str, LinkStats] = {}
        self._refused: Counter[str] = Counter()
        self._stopping = threading.Event()
        self._server: grpc.Server | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._watch = threading.Thread(target=self._look_after, name="split-watch", daemon=True)

    def start(self) -> int:
        """Listen, and return the port.

        Raises:
            ConfigError: the address cannot be had.
        """
        most = 2 * self.limits.sessions + self.limits.waiting
        self._pool = ThreadPoolExecutor(most, thread_name_prefix="split-stream")
        self._server = grpc.server(
            self._pool, options=server_options(most), maximum_concurrent_rpcs=most
        )
        handler: Any = grpc.stream_stream_rpc_method_handler(self._exchange)
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
        )
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(self._address)
            else:
                port = self._server.add_secure_port(self._address, self._credentials)
        except RuntimeError:
            self._pool.shutdown()
            raise ConfigError(f"cannot listen on {self._address}; name a free port") from None
        self._server.start()
        self._watch.start()
        return port

    def stop(self, grace: float = 5.0) -> None:
        """End every session (the sites are told) and close; waits at most about ``grace`` s."""
        self._stopping.set()
        for session in self._all():
            self._forget(session, lost("the cloud's server was stopped"), tell=False)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.outbox.close()
        if self._server is not None:
            self._server.stop(grace).wait(grace + 5)
            self._watch.join(5)
        if self._pool is not None:
            self._pool.shutdown()
        for stream in streams:
            stream.join(grace)

    def drop(self, *sites: str) -> None:
        """End the sessions of these sites; they must join again.

        The handler's ``gone`` is called from this thread.
        """
        for session in self._all():
            if session.site in sites:
                self._forget(session, lost(f"the cloud has dropped site {session.site!r}"))

    def stats(self) -> Stats:
        """What was counted so far."""
        with self._lock:
            sites = dict(self._past)
            for stream in self._streams:
                if stream.site:
                    sites[stream.site] = _sum(sites.get(stream.site), stream.count())
            for session in self._sessions.values():
                sites[session.site] = _sum(sites.get(session.site), session.count())
            return Stats(
                sites, len(self._sessions), len(self._streams),
                dict(self._refused), self.store.held,
            )  # fmt: skip

    # Streams

    def _exchange(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        stream = Stream(context, self.limits)
        if not self._enter(stream):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams of this machine are open"
            )
        try:
            if context.add_callback(stream.outbox.close):
                stream.read(requests, self)
                yield from stream.outbox
        finally:
            stream.outbox.close()
            self._leave(stream)

    def _enter(self, stream: Stream) -> bool:
        with self._lock:
            strangers = sum(s.session is None and s.peer == stream.peer for s in self._streams)
            if strangers >= self.limits.waiting or self._stopping.is_set():
                return False
            self._streams.add(stream)
            return True

    def _leave(self, stream: Stream) -> None:
        with self._lock:
            self._streams.discard(stream)
            if stream.site:
                self._past[stream.site] = _sum(self._past.get(stream.site), stream.count())

    def count_refusal(self, error: SplitError) -> None:
        """An error goes out."""
        with self._lock:
            self._refused[type(error).__name__] += 1

    # Sessions

    def admit(self, stream: Stream, frame: Any) -> Session:
        """Find or begin the session that a hello asks for; may block.

        Raises:
            SplitError: it is refused.
        """
        hello = read_hello(frame)
        key, fresh = frame.session, frame.hello.fresh
        if hello.run != self.run:
            raise HandshakeRefused(f"this is run {self.run!r}, not {hello.run!r}", terms=("run",))
        with self._lock:
            known = self._sessions.get(key)
        # A session may last longer than its token; its key is proof enough of who comes back.
        check_token(
            self._secret, hello.token, hello.run, hello.site, hello.round,
            expired=known is not None,
        )  # fmt: skip
        check_terms(self.terms, hello.terms)
        stream.site = hello.site
        if known is None:
            if not fresh:
                raise lost("the cloud does not know this session")
            known = self._begin(hello, key, stream)
        if (known.site, known.hello.round) != (hello.site, hello.round):
            raise HandshakeRefused("the session is another site's or of another round")
        return known

    def _begin(self, hello: Hello, key: bytes, stream: Stream) -> Session:
        """Begin a session, or wait for the one that begins under this key."""
        with self._lock:
            door = self._doors.get(key)
            mine = door is None
            if door is None:
                if key in self._ended or self._stopping.is_set():
                    raise lost("the session has ended")
                self._check_room(hello.site)
                door = self._doors[key] = _Door(hello.site)
            step = self._steps.setdefault(hello.site, threading.Lock())
        if mine:
            self._open_door(door, hello, key, step, stream)
        while not door.open.wait(0.5):
            if stream.outbox.closed:
                raise lost("the stream broke")
        if door.error is not None:
            raise door.error
        assert door.session is not None
        return door.session

    def _check_room(self, site: str) -> None:
        if sum(door.site == site for door in self._doors.values()) >= MAX_DOORS:
            raise HandshakeRefused(f"site {site!r} is being let in already", retry=True)
        others = sum(session.site != site for session in self._sessions.values())
        count = others + len(self._doors) + 1
        if count > self.limits.sessions or count * self.limits.bytes > self.limits.total:
            raise HandshakeRefused(
                f"the server has {others} sessions and room for no more",
                retry=True, fault="cloud",
            )  # fmt: skip

    def _open_door(
        self, door: _Door, hello: Hello, key: bytes, step: threading.Lock, stream: Stream
    ) -> None:
        try:
            with step:  # one at a time of a site
                if stream.outbox.closed:  # a site that is gone must not end its successor
                    raise HandshakeRefused("the stream broke while it waited", retry=True)
                with self._lock:
                    before = self._latest.get(hello.site)
                if before is not None:
                    self._forget(before, lost("the site has joined anew"), tell=False)
                    before.drained()
                    before.told.wait()
                joined = self.handler.join(hello)
                session = Session(hello, key, joined, self.limits, self.store)
                with self._lock:
                    self._sessions[key] = self._latest[hello.site] = door.session = session
        except SplitError as error:
            door.error = error
        except Exception as error:  # the other sites go on
            said = str(error) if isinstance(error, FlowerGeoError) else repr(error)
            door.error = HandshakeRefused(f"the cloud could not let it in: {said}", fault="cloud")
        finally:
            with self._lock:
                self._doors.pop(key, None)
            door.open.set()

    def leave(self, session: Session) -> None:
        """The site says goodbye."""
        self._forget(session, lost("the site has ended the session"))

    def _forget(self, session: Session, error: SplitError, tell: bool = True) -> None:
        if not session.end(error):
            return
        with self._lock:
            self._sessions.pop(session.stamp.session, None)
            self._ended.append(session.stamp.session)
            self._past[session.site] = _sum(self._past.get(session.site), session.count())
        try:
            if tell:
                self.handler.gone(session.site)
        finally:
            session.told.set()

    def _all(self) -> list[Session]:
        with self._lock:
            return sorted(self._sessions.values(), key=lambda session: session.site)

    # Time

    def _look_after(self) -> None:
        tick = max(0.05, min(1.0, self.limits.beat / 2, self.limits.greeting / 2))
        while not self._stopping.wait(tick):
            now = time.monotonic()
            with self._lock:
                streams = list(self._streams)
            for stream in streams:
                stream.look(now)
            for session in self._all():
                away = session.away
                if away is not None and now - away > self.limits.linger:
                    self._forget(session, lost(f"the site was away for {now - away:.0f} s"))


def _sum(one: LinkStats | None, other: LinkStats) -> LinkStats:
    if one is None:
        return other
    return replace(
        one,
        sent=one.sent + other.sent,
        received=one.received + other.received,
        calls=one.calls + other.calls,
        answers=one.answers + other.answers,
        connections=one.connections + other.connections,
    )
