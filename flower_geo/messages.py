"""What the coordinator and a site say to each other inside Flower messages.

Both directions are a ``RecordDict`` with a ``ConfigRecord`` named ``geo``; a
request adds ``config`` (the training configuration), a reply adds ``metrics``;
either may carry an ``ArrayRecord`` named ``arrays``.  Everything read from the
other side is checked here, field by field, before anyone uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from flower_geo.config import check_name
from flower_geo.errors import ConfigError, ReplyRefused

__all__ = ["NOTICE", "PROTOCOL", "Reply", "Request", "UpdateKind", "one_line"]

#: Raised by one whenever an older side could not understand a newer one.
PROTOCOL = 5

PayloadKind = Literal["none", "deltas", "snapshot"]
Status = Literal["done", "need", "refused"]
UpdateKind = Literal["none", "weights", "delta"]

#: No site trains on more tokens than this in a round; a larger claim is false.
MAX_WEIGHT = 2.0**45
#: Metrics that count something; the coordinator weighs and resumes by them.
COUNTS = ("tokens", "examples", "steps", "consumed", "eval-tokens")
#: Metrics a reply may hold, and the length of their names.
MAX_METRICS, MAX_KEY = 256, 64
#: Letters of a hash, a version name or a fingerprint.
MAX_HASH = 128
#: Letters of a text for people.
MAX_TEXT = 500
#: Rounds, versions and positions are not above this.
MAX_NUMBER = 2**53
#: No measured number is larger; sums over sites stay finite.
MAX_METRIC = 1e40

#: Key of a request's config under which a site is told why it may not take part.
NOTICE = "notice"

#: Letters of fields that are longer than a hash.
_LONGER = {"stream": 16_384}

#: Cut to length instead of refused: they are for people only.
_TEXTS = frozenset({"detail", "error", "data", "codec"})


def one_line(text: str, limit: int = MAX_TEXT) -> str:
    """Text from outside as one printable line: a terminal obeys what it is shown."""
    shown = "".join(c if c.isprintable() else " " for c in text[: 4 * limit])
    return " ".join(shown.split())[:limit]


@dataclass(frozen=True)
class Request:
    """From the coordinator to a site.

    Attributes:
        run_name, run_uid: the run; the uid tells runs of one name apart.
        incarnation: life of the server that asks.
        round, attempt: the round (from 1; 0 for a greeting) and its try.
        version, base_hash: the model version to train from, and its proof.
        accepted: the newest round whose update of this site was folded in; the
            site goes on from its state after that round (0 = from the start).
        consumed: sequences this site had used up by then, for a site that lost
            its state.
        position, span: where on the run's schedule the round stands, in steps.
        fingerprint: hash of the training configuration.
        payload, first, last: what ``arrays`` holds, see ``Broadcaster.offer``.
        evaluate: measure the held-out loss of the base before training.
        stream: where and with what the site dials in for a stream of its own; empty
            for none.  No part of what is asked: the same request made again carries
            another.
        config: training configuration, kebab-case.
    """

    run_name: str
    run_uid: str
    incarnation: int = 1
    round: int = 0
    attempt: int = 1
    version: int = 0
    base_hash: str = ""
    accepted: int = 0
    consumed: int = 0
    position: float = 0.0
    span: float = 0.0
    fingerprint: str = ""
    payload: PayloadKind = "none"
    first: int = 0
    last: int = 0
    evaluate: bool = False
    stream: str = field(default="", compare=False, repr=False)
    protocol: int = PROTOCOL
    config: dict[str, Any] = field(default_factory=dict)
    arrays: ArrayRecord | None = None

    def to_records(self) -> RecordDict:
        """Pack into a new ``RecordDict``; never shared between messages."""
        records = RecordDict({"geo": _scalars(self), "config": ConfigRecord(dict(self.config))})
        if self.arrays is not None:
            records["arrays"] = self.arrays
        return records

    @classmethod
    def from_records(cls, records: RecordDict) -> Request:
        """Read and check a request.

        Raises:
            ConfigError: it is not one, or of another protocol version, or it is
                no question but the coordinator's word why this site may not take part.
        """
        try:
            values = _checked(cls, records["geo"])
            if values["protocol"] != PROTOCOL:
                raise ConfigError(
                    f"the coordinator speaks protocol {values['protocol']}, this site {PROTOCOL}; "
                    "install the same flower-geo version at both"
                )
            check_name(values["run_name"], "run name")
            check_name(values["run_uid"], "run uid")
            if not isinstance(records["config"], ConfigRecord):
                raise TypeError("'config' is no ConfigRecord")
            config = dict(records["config"])
            if NOTICE in config:
                raise ConfigError(one_line(str(config[NOTICE])))
            return cls(
                **values,
                config=config,
                arrays=_arrays(records),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"a request cannot be read: {one_line(str(error))}") from None


@dataclass(frozen=True)
class Reply:
    """From a site to the coordinator.

    Attributes:
        status: ``done``; ``need`` (the site lacks the base and says what it
            holds); ``refused`` (it cannot do this, ``detail`` says why).
        site: the site's name.
        round, version, base_hash, fingerprint: echo of what was done.
        kind: what ``arrays`` holds.
        held_version, held_hash: the newest base at the site.
        identity: short hashes of the parts of a frozen base model, where there is one.
        data: what the site trains on, for people.
        at_work: seconds this very request kept the site's process; what is left of
            the round trip was spent on the way.  No part of what is answered: the
            same reply given again from the cache takes another time.
        follows: node id of the SuperNode that served the site before and is known to be
            dead; empty where nothing is known.  No part of what is answered either.
        metrics: numbers; see ``flower_geo.site``.
    """

    status: Status
    site: str
    detail: str = ""
    error: str = ""
    round: int = 0
    version: int = 0
    base_hash: str = ""
    fingerprint: str = ""
    kind: UpdateKind = "none"
    held_version: int = -1
    held_hash: str = ""
    tokenizer_hash: str = ""
    identity: str = ""
    data: str = ""
    codec: str = ""
    at_work: float = field(default=0.0, compare=False)
    follows: str = field(default="", compare=False)
    protocol: int = PROTOCOL
    metrics: dict[str, float] = field(default_factory=dict)
    arrays: ArrayRecord | None = None

    def to_records(self) -> RecordDict:
        """Pack into a new ``RecordDict``."""
        records = RecordDict({"geo": _scalars(self), "metrics": MetricRecord(dict(self.metrics))})
        if self.arrays is not None:
            records["arrays"] = self.arrays
        return records

    @classmethod
    def from_records(cls, records: RecordDict) -> Reply:
        """Read and check a reply; it comes from a machine we do not own.

        Raises:
            ReplyRefused: it is not one, or a field is of the wrong type or size.
        """
        try:
            values = _checked(cls, records["geo"])
            if values["protocol"] != PROTOCOL:
                raise ReplyRefused(
                    f"the site speaks protocol {values['protocol']}, the coordinator {PROTOCOL}; "
                    "install the same flower-geo version at both"
                )
            check_name(values["site"], "site name")
            for key in _TEXTS:
                values[key] = one_line(values[key])
            return cls(**values, metrics=_metrics(records), arrays=_arrays(records))
        except ConfigError as error:
            raise ReplyRefused(str(error)) from None
        except (KeyError, TypeError, ValueError) as error:
            raise ReplyRefused(f"a reply cannot be read: {one_line(str(error))}") from None


def _metrics(records: RecordDict) -> dict[str, float]:
    """The reply's numbers, every one of them finite and every count believable."""
    record = records["metrics"]
    if not isinstance(record, MetricRecord):
        raise TypeError("'metrics' is no MetricRecord")
    if len(record) > MAX_METRICS:
        raise ValueError(f"it holds {len(record)} metrics, more than {MAX_METRICS}")
    metrics = {}
    for key, value in record.items():
        if not isinstance(value, int | float) or len(key) > MAX_KEY or not key.isprintable():
            raise ReplyRefused(f"metric {one_line(key, MAX_KEY)!r} is no number")
        # Compared before it is converted: an int may be beyond any float.
        if not abs(value) <= MAX_METRIC:
            raise ReplyRefused(f"{key} is not finite, or larger than {MAX_METRIC:g}")
        metrics[key] = float(value)
    for key in COUNTS:
        claimed = metrics.get(key, 0.0)
        if not 0 <= claimed <= MAX_WEIGHT:
            raise ReplyRefused(f"{key}={claimed:g} is no number of {key} a round can use")
    if "loss-before" in metrics and "eval-tokens" not in metrics:
        raise ReplyRefused("it reports a held-out loss without eval-tokens")
    return metrics


def _arrays(records: RecordDict) -> ArrayRecord | None:
    arrays = records["arrays"] if "arrays" in records else None
    if arrays is not None and not isinstance(arrays, ArrayRecord):
        raise TypeError("'arrays' is no ArrayRecord")
    return arrays


def _scalars(message: Request | Reply) -> ConfigRecord:
    skipped = {"config", "arrays", "metrics"}
    return ConfigRecord(
        {f.name: getattr(message, f.name) for f in fields(message) if f.name not in skipped}
    )


def _checked(cls: type, record: object) -> dict[str, Any]:
    """Return the record's fields, each of the very type and size the dataclass names."""
    if not isinstance(record, ConfigRecord):
        raise TypeError("'geo' is no ConfigRecord")
    hints = get_type_hints(cls)
    values: dict[str, Any] = {}
    for item in fields(cls):
        if item.name in {"config", "arrays", "metrics"}:
            continue
        if item.name not in record:
            raise ValueError(f"it lacks {item.name}")
        value, hint = record[item.name], hints[item.name]
        choices = get_args(hint)
        if type(value) is not (str if choices else hint):
            raise TypeError(f"{item.name} is of type {type(value).__name__}")
        if choices and value not in choices:
            raise ValueError(f"{item.name} is {value[:40]!r}, not one of {', '.join(choices)}")
        longest = _LONGER.get(item.name, MAX_HASH)
        if isinstance(value, str) and item.name not in _TEXTS and len(value) > longest:
            raise ValueError(f"{item.name} has {len(value)} letters, more than {longest}")
        if isinstance(value, int | float):
            lowest = -1 if item.name == "held_version" else 0
            if not lowest <= value <= MAX_NUMBER:
                raise ValueError(f"{item.name} is {value:g}, not between {lowest} and 2^53")
        values[item.name] = value
    return values
