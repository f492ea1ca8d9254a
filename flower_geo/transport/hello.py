"""What the two ends tell each other before anything is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from flower_geo.config import check_name
from flower_geo.errors import ConfigError, HandshakeRefused
from flower_geo.transport import split_pb2 as pb
from flower_geo.transport.token import MAX_TOKEN

__all__ = ["PROTOCOL", "Hello", "Joined", "check_terms", "hello_frame", "read_hello"]

#: Raised by one whenever an older end could not understand a newer one.
PROTOCOL = 1
#: Terms of a hello, letters of a name and of a value, and steps that it may list.
MAX_TERMS, MAX_TERM, MAX_STEPS = 64, 512, 1024
#: Rounds, steps and tries are not above this.
MAX_NUMBER = 2**53


@dataclass(frozen=True)
class Hello:
    """What a site says when it joins.

    Attributes:
        run, site: names.
        round, attempt: the round, and its try.
        token: from ``issue_token``.
        terms: what both ends must agree on, by name.
        steps: steps of the round that the site can go on from; 0 always among them.
        deadline: seconds the site waits to be let in.
    """

    run: str
    site: str
    round: int
    attempt: int = 1
    token: str = field(default="", repr=False)
    terms: Mapping[str, str] = field(default_factory=dict)
    steps: tuple[int, ...] = (0,)
    deadline: float = 60.0


@dataclass(frozen=True)
class Joined:
    """Where a session begins: the life both ends are in, and the step they go on after."""

    epoch: int
    step: int


def hello_frame(
    hello: Hello, session: bytes, epoch: int, fresh: bool, done: int, also: list[int]
) -> pb.Frame:
    """The first frame of a stream."""
    return pb.Frame(
        session=session,
        epoch=epoch,
        round=hello.round,
        attempt=hello.attempt,
        hello=pb.Hello(
            protocol=PROTOCOL,
            run=hello.run,
            site=hello.site,
            token=hello.token,
            terms=dict(hello.terms),
            steps=hello.steps,
            patience=int(hello.deadline * 1000),
            fresh=fresh,
            done=done,
            also=also,
        ),
    )


def read_hello(frame: pb.Frame) -> Hello:
    """Read and check a hello; who sent it is not known yet.

    Raises:
        HandshakeRefused: it is none, or a field is out of bounds.
    """
    if frame.WhichOneof("body") != "hello":
        raise HandshakeRefused("a stream begins with a hello")
    found = frame.hello
    if found.protocol != PROTOCOL:
        raise HandshakeRefused(
            f"the site's stream speaks protocol {found.protocol}, the cloud's {PROTOCOL}; "
            "install the same flower-geo version at both",
            terms=("protocol",),
        )
    try:
        check_name(found.run, "run name")
        check_name(found.site, "site name")
    except ConfigError as error:
        raise HandshakeRefused(str(error)) from None
    long = any(len(text) > MAX_TERM for pair in found.terms.items() for text in pair)
    if long or len(found.terms) > MAX_TERMS or len(found.token) > MAX_TOKEN:
        raise HandshakeRefused("a hello's terms or token are too long")
    steps = tuple(sorted(set(found.steps)))
    if len(found.steps) > MAX_STEPS or not steps or steps[0] != 0 or steps[-1] > MAX_NUMBER:
        raise HandshakeRefused(f"a hello lists 1 to {MAX_STEPS} steps, 0 among them")
    if len(frame.session) != 16 or frame.round > MAX_NUMBER:
        raise HandshakeRefused("a hello has a session of 16 bytes and a round below 2^53")
    return Hello(
        run=found.run,
        site=found.site,
        round=frame.round,
        attempt=frame.attempt,
        token=found.token,
        terms=dict(found.terms),
        steps=steps,
        deadline=min(found.patience / 1000, 86_400.0),
    )


def check_terms(mine: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    """Compare the terms of the cloud (``mine``) with those of a site.

    Raises:
        HandshakeRefused: some differ; each is named with both values.
    """
    names = tuple(sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n)))
    if names:
        told = "; ".join(
            f"{name[:64]}: the cloud has {_shown(mine, name)}, the site {_shown(theirs, name)}"
            for name in names
        )
        raise HandshakeRefused(f"the two ends do not agree on {told}", terms=names)


def _shown(terms: Mapping[str, str], name: str) -> str:
    return repr(terms[name][:64]) if name in terms else "none"
