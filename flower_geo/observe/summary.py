"""What a list of metrics events says about a run: rounds, sites, bytes, losses.

Loss figures follow the weights that were kept: a round that was done again
after a restart counts once, as it was last done.  Byte figures follow the
network: what was sent for attempts that came to nothing is counted too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from flower_geo.observe.units import number, printable

__all__ = ["WHOLE", "Fault", "RoundRow", "Run", "SiteRow", "ends_of", "summarise"]

WHOLE: Final = "*"
"""Name under which the held-out loss over all sites is logged."""


@dataclass
class RoundRow:
    """One round; bytes are sums over every attempt at it, in every incarnation."""

    round: int
    asked: int | None = None
    accepted: int | None = None
    train_loss: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    steps: float = 0.0
    """Inner optimizer steps, summed over the sites whose update was accepted."""


@dataclass
class SiteRow:
    """One site over the whole run."""

    name: str
    data: str | None = None
    rounds_asked: int = 0
    rounds_answered: int = 0
    tokens: float = 0.0
    seconds: float = 0.0
    steps: float = 0.0
    bytes_up: float = 0.0
    bytes_down: float = 0.0
    train_loss: dict[int, float | None] = field(default_factory=dict)
    held_out: dict[int, float | None] = field(default_factory=dict)
    """Loss of the global model on this site's held-out text after so many commits."""
    loss_before: dict[int, float | None] = field(default_factory=dict)
    loss_after: dict[int, float | None] = field(default_factory=dict)
    """Loss of the site's own model at the end of its local steps, by round."""
    status: dict[int, str] = field(default_factory=dict)
    """How each round ended for the site: accepted, late, refused, failed or missing."""
    codecs: list[str] = field(default_factory=list)
    """Codecs of the updates, in order, each named where it took over from another."""
    speed_up: float | None = None
    speed_down: float | None = None
    """Newest known speeds of the site's line in bytes a second."""
    not_accepted: dict[str, int] = field(default_factory=dict)
    """Answers that did not count, over all attempts: status -> how many."""

    @property
    def curve(self) -> dict[int, float | None]:
        """Held-out loss of the global model by commits: as evaluated, else as sites saw it."""
        seen = {round_ - 1: loss for round_, loss in self.loss_before.items()}
        return dict(sorted({**seen, **self.held_out}.items()))


@dataclass(frozen=True)
class Fault:
    """Something that went wrong and that the run outlived."""

    round: int | None
    site: str | None
    what: str
    detail: str | None = None
    time: float | None = None


@dataclass
class Run:
    """All that the report and the byte comparison need."""

    start: dict[str, Any] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    rounds: list[RoundRow] = field(default_factory=list)
    sites: dict[str, SiteRow] = field(default_factory=dict)
    held_out: dict[int, float | None] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    turned_down: list[Fault] = field(default_factory=list)
    """Answers that did not count, and why; ``what`` is refused, failed or late."""
    bytes_evaluation: float = 0.0
    """Sent to sites for an evaluation outside the rounds: the finished model."""
    comparison: Mapping[str, Any] = field(default_factory=dict)
    """The newest ``comparison`` event: base, local-only and federated, by site."""
    incarnations: int = 0
    seconds: float | None = None
    """Wall time during which a coordinator was running."""
    first_time: float | None = None
    last_time: float | None = None

    @property
    def parameters(self) -> float | None:
        """Number of trained parameters."""
        count = number(self.start.get("parameters"))
        return count if count is not None and count > 0 else None

    @property
    def status(self) -> str:
        """``completed``, ``failed``, ``stopped``, or ``running`` while no end is recorded."""
        return "running" if self.end is None else printable(self.end.get("status") or "ended", 24)


def summarise(events: Iterable[Mapping[str, Any]]) -> Run:
    """Fold events, in file order, into a `Run`; events and keys it does not know are left out."""
    builder = _Builder()
    for event in events:
        builder.add(event)
    return builder.finish()


def ends_of(curve: Mapping[int, float | None]) -> tuple[float, float] | None:
    """Return the first and the last known value of a curve, by round."""
    values = [y for _, y in sorted(curve.items()) if y is not None]
    return (values[0], values[-1]) if values else None


def _name(value: object) -> str | None:
    return None if value is None or value == "" else printable(value)


def _round(value: object) -> int | None:
    found = number(value)
    return int(found) if found is not None and 0 <= found < 1e9 else None


def _count(value: object) -> int | None:
    return len(value) if isinstance(value, (list, tuple)) else _round(value)


def _amount(value: object) -> float:
    found = number(value)
    return found if found is not None and found > 0 else 0.0


def _fault(event: Mapping[str, Any], what: object, detail: object) -> Fault:
    text = None if detail is None else printable(detail, 400)
    round_, site = _round(event.get("round")), _name(event.get("site"))
    return Fault(round_, site, printable(what), text, number(event.get("time")))


@dataclass
class _Attempt:
    """Bytes of one attempt at a round, as the round says and as its sites say."""

    own: tuple[float, float] = (0.0, 0.0)
    sites: dict[str, tuple[float, float]] = field(default_factory=dict)

    def total(self, way: int) -> float:
        # Whichever is more complete: a round's own figure may leave out replies
        # that were refused, and the sum over sites those it does not know.
        return max(self.own[way], sum(pair[way] for pair in self.sites.values()))


@dataclass(frozen=True)
class _Reply:
    """What counts of a site's answers to one round: the newest, and a good one before a bad one."""

    rank: tuple[int, int, bool]  # incarnation, attempt, accepted
    status: str
    event: Mapping[str, Any]


class _Builder:
    def __init__(self) -> None:
        self.run = Run()
        self._rounds: dict[int, Mapping[str, Any]] = {}
        self._replies: dict[tuple[int, str], _Reply] = {}
        self._attempts: dict[tuple[int, int, int], _Attempt] = {}
        self._newest: dict[tuple[int, int], int] = {}
        self._statuses: dict[tuple[int, int, int, str], str] = {}
        self._evaluation: dict[str, float] = {}
        self._life = 0
        self._life_start: float | None = None
        self._lives: list[float] = []

    def add(self, event: Mapping[str, Any]) -> None:
        when = number(event.get("time"))
        if when is not None:
            if event.get("event") == "start" or self._life_start is None:
                self._close_life()
                self._life_start = when
            self.run.first_time = when if self.run.first_time is None else self.run.first_time
            self.run.last_time = when
        handler = {
            "start": self._on_start,
            "sites": self._on_sites,
            "site": self._on_site,
            "round": self._on_round,
            "eval": self._on_eval,
            "evaluation": self._on_evaluation,
            "comparison": self._on_comparison,
            "fault": self._on_fault,
            "end": self._on_end,
        }.get(str(event.get("event")))
        if handler is not None:
            handler(event)

    def _close_life(self) -> None:
        if self._life_start is not None and self.run.last_time is not None:
            self._lives.append(max(0.0, self.run.last_time - self._life_start))
        self._life_start = None

    def _on_start(self, event: Mapping[str, Any]) -> None:
        self._life += 1
        kept = _round(event.get("resumed_from"))
        if self.run.start:
            again = "coordinator restarted"
            detail = None if kept is None else f"resumed after round {kept}"
            time = number(event.get("time"))
            if self.run.end is None:
                self.run.faults.append(Fault(kept, None, again, detail, time))
        if kept is not None:
            self._forget_after(kept)
        known = {key: value for key, value in event.items() if value is not None}
        self.run.start = {**self.run.start, **known}
        self.run.end = None
        self._on_sites(event)

    def _on_sites(self, event: Mapping[str, Any]) -> None:
        names = event.get("sites")
        for name in names if isinstance(names, (list, tuple)) else ():
            self._site(name)

    def _forget_after(self, kept: int) -> None:
        """Drop figures of rounds that were not committed before the coordinator died."""
        self._rounds = {r: e for r, e in self._rounds.items() if r <= kept}
        # Replies to the round that was open stay: a restart may find them on disk.
        self._replies = {key: r for key, r in self._replies.items() if key[0] <= kept + 1}
        self.run.held_out = {r: v for r, v in self.run.held_out.items() if r <= kept}
        for site in self.run.sites.values():
            site.held_out = {r: v for r, v in site.held_out.items() if r <= kept}

    def _site(self, value: object) -> SiteRow | None:
        name = _name(value)
        if name is None or name == WHOLE:
            return None
        return self.run.sites.setdefault(name, SiteRow(name))

    def _key(self, event: Mapping[str, Any], round_: int) -> tuple[int, int, int]:
        attempt = _round(event.get("attempt"))
        if attempt is None:  # it speaks of the attempt that was last heard of
            attempt = self._newest.get((self._life, round_), 0)
        self._newest[(self._life, round_)] = attempt
        return (self._life, round_, attempt)

    def _on_site(self, event: Mapping[str, Any]) -> None:
        site, round_ = self._site(event.get("site")), _round(event.get("round"))
        if site is None or round_ is None:
            return
        if event.get("data") is not None:
            site.data = printable(event["data"])
        key = self._key(event, round_)
        pairs = self._attempts.setdefault(key, _Attempt()).sites
        # One question, told of twice (missing, then late): its bytes count once.
        up, down = pairs.get(site.name, (0.0, 0.0))
        pairs[site.name] = (
            max(up, _amount(event.get("bytes_up"))),
            max(down, _amount(event.get("bytes_down"))),
        )
        status = printable(event.get("status") or "accepted", 24)
        if status not in ("accepted", "missing") and event.get("reason"):
            self.run.turned_down.append(_fault(event, status, event["reason"]))
        self._statuses[(*key, site.name)] = status
        rank = (key[0], key[2], status == "accepted")
        before = self._replies.get((round_, site.name))
        if before is None or rank >= before.rank:
            self._replies[(round_, site.name)] = _Reply(rank, status, event)

    def _on_round(self, event: Mapping[str, Any]) -> None:
        round_ = _round(event.get("round"))
        if round_ is None:
            return
        self._rounds[round_] = event
        attempt = self._attempts.setdefault(self._key(event, round_), _Attempt())
        attempt.own = (_amount(event.get("bytes_up")), _amount(event.get("bytes_down")))

    def _on_eval(self, event: Mapping[str, Any]) -> None:
        round_ = _round(event.get("round"))
        if round_ is None:
            return
        loss = number(event.get("loss"))
        if event.get("site") in (None, WHOLE):
            self.run.held_out[round_] = loss
            return
        site = self._site(event["site"])
        if site is not None:
            site.held_out[round_] = loss
            if site.data is None and event.get("data") is not None:
                site.data = printable(event["data"])

    def _on_fault(self, event: Mapping[str, Any]) -> None:
        self.run.faults.append(_fault(event, event.get("what") or "fault", event.get("detail")))

    def _on_evaluation(self, event: Mapping[str, Any]) -> None:
        down, site = _amount(event.get("bytes_down")), self._site(event.get("site"))
        self.run.bytes_evaluation += down
        if site is not None:
            self._evaluation[site.name] = self._evaluation.get(site.name, 0.0) + down

    def _on_comparison(self, event: Mapping[str, Any]) -> None:
        self.run.comparison = dict(event)

    def _on_end(self, event: Mapping[str, Any]) -> None:
        self.run.end = dict(event)

    def finish(self) -> Run:
        self._close_life()
        run = self.run
        run.incarnations = self._life
        if self._lives:
            run.seconds = sum(self._lives)
        elif run.end is not None:
            run.seconds = number(run.end.get("seconds"))
        run.held_out = dict(sorted(run.held_out.items()))
        self._fill_sites()
        self._fill_rounds()
        return run

    def _fill_sites(self) -> None:
        for (round_, name), reply in sorted(self._replies.items()):
            site, event = self.run.sites[name], reply.event
            site.status[round_] = reply.status
            if reply.status != "accepted":
                continue
            site.rounds_answered += 1
            site.tokens += _amount(event.get("tokens"))
            site.seconds += _amount(event.get("seconds"))
            site.steps += _amount(event.get("steps"))
            site.train_loss[round_] = number(event.get("train_loss"))
            site.speed_up = number(event.get("speed_up")) or site.speed_up
            site.speed_down = number(event.get("speed_down")) or site.speed_down
            spec = _name(event.get("codec_up"))
            if spec is not None and site.codecs[-1:] != [spec]:
                site.codecs.append(spec)
            for key, into in (("loss_before", site.loss_before), ("loss_after", site.loss_after)):
                if event.get(key) is not None:
                    into[round_] = number(event[key])
        for (_, _, _, name), status in self._statuses.items():
            if status != "accepted":
                counts = self.run.sites[name].not_accepted
                counts[status] = counts.get(status, 0) + 1
        for site in self.run.sites.values():
            site.rounds_asked = len(site.status)
            site.held_out = dict(sorted(site.held_out.items()))
            for way, key in enumerate(("bytes_up", "bytes_down")):
                pairs = (a.sites.get(site.name, (0.0, 0.0)) for a in self._attempts.values())
                setattr(site, key, sum(pair[way] for pair in pairs))
            site.bytes_down += self._evaluation.get(site.name, 0.0)

    def _fill_rounds(self) -> None:
        inner_steps = _amount(self.run.start.get("inner_steps"))
        by_round: dict[int, list[_Reply]] = {}
        for (round_, _), reply in self._replies.items():
            by_round.setdefault(round_, []).append(reply)
        attempts: dict[int, list[_Attempt]] = {}
        for (_, round_, _), attempt in self._attempts.items():
            attempts.setdefault(round_, []).append(attempt)
        for round_ in sorted(set(self._rounds) | set(attempts)):
            event = self._rounds.get(round_, {})
            replies = by_round.get(round_, [])
            good = [reply.event for reply in replies if reply.status == "accepted"]
            asked, accepted = _count(event.get("asked")), _count(event.get("accepted"))
            row = RoundRow(
                round_,
                asked=asked if asked is not None else len(replies) or None,
                accepted=accepted if accepted is not None else len(good),
                train_loss=number(event.get("train_loss")),
                tokens=number(event.get("tokens")),
                tokens_per_second=number(event.get("tokens_per_second")),
                seconds=number(event.get("seconds")),
                bytes_up=sum(attempt.total(0) for attempt in attempts.get(round_, [])),
                bytes_down=sum(attempt.total(1) for attempt in attempts.get(round_, [])),
            )
            row.steps = sum(_amount(e.get("steps")) or inner_steps for e in good)
            if not good:
                row.steps = inner_steps * (row.accepted or 0)
            self.run.rounds.append(row)
