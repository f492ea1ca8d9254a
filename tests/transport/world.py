"""A server, its clients and a handler that notes what it was asked."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from flower_geo.calls import Answer, Blob, Call
from flower_geo.errors import SplitError
from flower_geo.transport import Hello, Joined, Limits, SplitClient, SplitServer, issue_token

__all__ = [
    "QUICK",
    "RUN",
    "SECRET",
    "TERMS",
    "Notes",
    "client",
    "digest",
    "hello",
    "serving",
    "until",
]

SECRET, RUN = b"0123456789abcdef0123456789abcdef", "run"
TERMS = {"model": "sha256:1", "cut": "2", "codecs": "fp32"}
#: Times of seconds, small chunks.
QUICK = Limits(chunk=1024, beat=20.0, silence=60.0, call=30.0)


def digest(blob: Blob) -> str:
    """Hash of a blob's bytes."""
    return hashlib.sha256(blob).hexdigest()


class Notes:
    """Answers every call from another thread with what came, and keeps a list of calls."""

    def __init__(self, make: Callable[[str, Call], Answer | SplitError] | None = None) -> None:
        self.calls: list[tuple[str, str, int, int]] = []
        self.joins: list[Hello] = []
        self.left: list[str] = []
        self.epoch = 7
        self._make = make or _echo
        self._lock = threading.Lock()

    def join(self, hello: Hello) -> Joined:
        with self._lock:
            self.joins.append(hello)
        return Joined(self.epoch, hello.steps[-1])

    def serve(self, site: str, call: Call, answer: Callable[[Answer | SplitError], None]) -> None:
        with self._lock:
            self.calls.append((site, call.kind, call.step, call.micro))
        answer(self._make(site, call))

    def gone(self, site: str) -> None:
        with self._lock:
            self.left.append(site)


def _echo(site: str, call: Call) -> Answer:
    meta = {"site": site, "step": call.step, "meta": dict(call.meta)}
    return Answer(meta, {name: bytes(blob)[::-1] for name, blob in call.blobs.items()})


@contextmanager
def serving(
    handler: Any, limits: Limits = QUICK, **options: Any
) -> Iterator[tuple[SplitServer, str]]:
    """A server on a free port, and its address."""
    server = SplitServer(handler, secret=SECRET, run=RUN, terms=TERMS, limits=limits, **options)
    port = server.start()
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        server.stop(1.0)


def hello(site: str = "a", round: int = 1, **changes: Any) -> Hello:
    """A hello that is let in."""
    values: dict[str, Any] = {
        "run": RUN,
        "site": site,
        "round": round,
        "token": issue_token(SECRET, RUN, site, round, 60),
        "terms": TERMS,
    }
    return Hello(**values | changes)


def client(address: str, site: str = "a", limits: Limits = QUICK, **options: Any) -> SplitClient:
    """A client of that site."""
    said = {key: options.pop(key) for key in ("terms", "token", "round", "run") if key in options}
    values: dict[str, Any] = {"deadline": 10.0} | options
    return SplitClient(address, hello(site, **said), limits=limits, **values)


def until(true: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait for something that happens in another thread."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
