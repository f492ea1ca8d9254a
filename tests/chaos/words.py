"""What happens in each case of the matrix, in words: ``docs/faults.md`` shows them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NAMES", "ORDER", "WORDS", "Words"]


@dataclass(frozen=True)
class Words:
    """A row of the page.

    Attributes:
        happens: what the run does about it.
        lost: what is lost by it, beside time.
        case: the case of README's "What happens when ..." that this is, as it begins there;
            empty where README says nothing of it.
        phrase: words of ``happens`` that README says there as well.
    """

    happens: str
    lost: str = "nothing"
    case: str = ""
    phrase: str = ""


#: Targets in the page's order, as it names them.
NAMES = {
    "worker": "a site's worker", "clientapp": "a site's ClientApp",
    "supernode": "a site, all of it",
    "serverapp": "the ServerApp", "superlink": "the SuperLink", "supervisor": "`flower-geo run`",
    "network": "a site's network", "bits": "a file on disk", "disk": "the coordinator's disk",
    "reply": "a reply",
}  # fmt: skip
ORDER = tuple(NAMES)

_SITE, _WORKER = "a site is cut off or dies", "a site's worker dies"
_SERVER, _LINK = "the coordinator's ServerApp dies", "the SuperLink dies or is away"

_KILLED = {
    "worker": Words(
        "it is started again by the ClientApp and goes on from the last snapshot within the round",
        "at most `snapshot-steps` steps", _WORKER,
        "goes on from the last snapshot within the round",
    ),
    "clientapp": Words(
        "the worker does not need it: it finishes its round, keeps the reply and gives it when "
        "the site is asked again; Flower notices after a minute",
        "nothing", _WORKER, "it finishes its round, keeps the reply",
    ),
    "supernode": Words(
        "the round goes on with those it has; the site takes up its own state when it "
        "comes back, under whatever node id",
        "what the site did in this round since its last snapshot", _SITE,
        "goes on with those it has",
    ),
    "serverapp": Words(
        "`flower-geo run` submits again; replies already on disk are used, and sites asked again "
        "answer from their cache",
        "nothing", _SERVER, "answer from their cache",
    ),
    "superlink": Words(
        "both sides wait for it; when it comes back without the run, `flower-geo run` submits "
        "again",
        "nothing", _LINK, "both sides wait for it",
    ),
    "supervisor": Words(
        "the run needs it only to be submitted again; `flower-geo run --attach RUN` takes its "
        "run up",
        "nothing", _LINK, "takes its run up",
    ),
}  # fmt: skip

_STOPPED = {
    "worker": Words(
        "it is noticed within two seconds, killed and started again, and goes on from the last "
        "snapshot within the round",
        "at most `snapshot-steps` steps",
        _WORKER,
        "goes on from the last snapshot within the round",
    ),
    "clientapp": Words("the worker trains on; the reply goes out when it goes on"),
    "supernode": Words("the round goes on with those it has; it answers when it goes on"),
    "serverapp": Words("sites work on; it reads their replies when it goes on"),
    "superlink": Words("both sides wait for it", "nothing", _LINK, "both sides wait for it"),
    "supervisor": Words("nothing: the run goes on, and is shown when it goes on"),
}
_STOPPED_LONG = {
    **_STOPPED,
    "clientapp": Words(
        "Flower takes it for dead after a minute; the worker keeps the reply and gives it when "
        "the site is asked again"
    ),
    "supernode": Words(
        "Flower takes it for gone after a minute; the round goes on with those it has, and the "
        "site takes up its own state when it comes back",
        "nothing", _SITE, "goes on with those it has",
    ),
    "serverapp": Words(
        "Flower takes it for dead after a minute and `flower-geo run` submits again; the old one "
        "is ended first",
        "nothing", _SERVER, "`flower-geo run` submits again",
    ),
}  # fmt: skip
_AMONG_OTHERS = {
    part: Words(f"{words.happens} (every other part was killed within seconds)", words.lost)
    for part, words in _KILLED.items()
}
_CUT = Words(
    "the round goes on with those it has; the site answers from its cache once it is heard again",
    "nothing", _SITE, "goes on with those it has",
)  # fmt: skip

_REFUSED = "it is refused, with the reason in `metrics.jsonl` and the report; the round goes on"
_BAD = "a reply is damaged"


def _refused() -> Words:
    return Words(_REFUSED, "that reply", _BAD, "the round goes on")


#: A row for each target and fault the driver can do.
WORDS: dict[tuple[str, str], Words] = {
    **{(part, "kill -9"): words for part, words in _KILLED.items()},
    **{(part, "kill -9 among others"): words for part, words in _AMONG_OTHERS.items()},
    **{(part, "stopped 5 s"): words for part, words in _STOPPED.items()},
    **{(part, "stopped 75 s"): words for part, words in _STOPPED_LONG.items()},
    ("network", "reset"): Words("Flower connects again and sends again"),
    ("network", "cut 5 s"): Words("Flower tries again until it gets through"),
    ("network", "cut 75 s"): _CUT,
    ("network", "blackhole 8 s"): Words("Flower tries again until it gets through"),
    ("network", "blackhole 75 s"): _CUT,
    ("network", "slow 12 s"): Words("the round takes longer, or goes on with those it has"),
    ("bits", "flip checkpoint"): Words(
        "a torn or altered checkpoint is passed over for the one before it; the round after that "
        "is done again, to the same bits where the same sites answer",
        "time of one round", "a file of the run folder is damaged",
        "a torn or altered checkpoint is passed over for the one before it",
    ),
    ("bits", "flip spool"): Words(
        "the reply counts as never come, and its site answers again from its cache"
    ),
    ("bits", "flip base"): Words(
        "the site sees it by the hash and is sent the whole model within the round"
    ),
    ("bits", "flip generation"): Words(
        "a site's damaged state is put aside: it goes on with the data where it was",
        "that site's optimizer state and residual",
    ),
    ("disk", "full"): Words(
        "the run ends with one line; once there is space, the same command goes on, and the "
        "newest whole checkpoint is intact",
        "nothing", "the disk is full", "the newest whole checkpoint is intact",
    ),
    ("reply", "nan"): _refused(),
    ("reply", "spoilt"): _refused(),
    ("reply", "hostile"): _refused(),
    ("reply", "stale"): _refused(),
    ("reply", "duplicate"): Words("the second copy is not looked at"),
}  # fmt: skip
