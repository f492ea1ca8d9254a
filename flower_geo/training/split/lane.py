"""One site as the cloud's half sees it within a round."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from flower_geo.calls import Answer, Call
from flower_geo.errors import CallFailed, SplitError
from flower_geo.training.split.half import Half
from flower_geo.training.split.modes import Mode
from flower_geo.training.split.streams import Stream
from flower_geo.training.split.values import finite_number, refused, whole_number
from flower_geo.training.split.wire import WireEnd

__all__ = ["MAX_COUNT", "Lane", "Reply", "Traffic", "norms_in", "problem_of"]

#: Where the answer of a call goes.
Reply = Callable[[Answer | SplitError], None]

#: No step has more tokens.
MAX_COUNT = 2**45
#: Tensors of a site's half at most.
_MAX_NORMS = 100_000


@dataclass
class Traffic:
    """Calls and the bytes of their blobs, by direction.

    Attributes:
        calls: calls made.
        up: bytes from the site to the cloud.
        down: bytes from the cloud to the site.
    """

    calls: int = 0
    up: int = 0
    down: int = 0

    def sent(self, call: Call) -> None:
        """Count a call."""
        self.calls += 1
        self.up += sum(len(blob) for blob in call.blobs.values())

    def answered(self, answer: Answer) -> None:
        """Count an answer."""
        self.down += sum(len(blob) for blob in answer.blobs.values())


@dataclass
class Lane:
    """A site's place in a round.

    Attributes:
        site: its name.
        half: what its calls train; several lanes may share one.
        stream: dropout's.
        wire: the cloud's end.
        queue: calls to run, with where their answers go.
        step: steps taken.
        micro, back: micro-batches of the step under way, forward and backward.
        tokens: labels that count in them.
        total: labels of the whole step, as the site says.
        trained: tokens of the steps taken in this round.
        gradients: of the step under way.
        graphs: (input, output) of forwards that wait for their backward.
        finished: the site has taken its last step of the round.
        gone: it left.
        traffic: blobs.
    """

    site: str
    half: Half
    stream: Stream
    wire: WireEnd
    queue: deque[tuple[Call, Reply]] = field(default_factory=deque)
    step: int = 0
    micro: int = 0
    back: int = 0
    tokens: int = 0
    total: int = 0
    trained: int = 0
    gradients: dict[str, Tensor] = field(default_factory=dict)
    graphs: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    finished: bool = False
    gone: bool = False
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def active(self) -> bool:
        """Whether more steps of it are awaited."""
        return not (self.finished or self.gone)

    @property
    def between_steps(self) -> bool:
        """Whether nothing of the next step was done."""
        return self.micro == 0

    def undo(self) -> None:
        """Drop what was done of the step under way; the site may begin it anew."""
        self._clear()
        self.wire.rollback()

    def stepped(self) -> None:
        """The step was taken."""
        self.step += 1
        self.trained += self.tokens
        self._clear()
        self.wire.commit()

    def _clear(self) -> None:
        self.micro = self.back = self.tokens = self.total = 0
        self.gradients, self.graphs = {}, {}


def problem_of(lane: Lane, call: Call, mode: Mode, steps: int | None) -> CallFailed | None:
    """Why a call cannot be run as the lane's next one; None where it can."""
    try:
        if call.kind in ("evaluate", "finish"):
            return None
        if lane.finished or (steps is not None and lane.step >= steps):
            raise refused(f"step {call.step} comes after the round's last, {lane.step}")
        if call.step != lane.step + 1:
            raise refused(f"it is of step {call.step}, and step {lane.step + 1} comes next")
        _CHECKS[call.kind](lane, call, mode)
    except CallFailed as error:
        return error
    return None


def _check_forward(lane: Lane, call: Call, mode: Mode) -> None:
    # The first micro-batch begins the step anew, whatever was done of it.
    if call.micro not in (0, lane.micro):
        raise refused(f"it is of micro-batch {call.micro}, and {lane.micro} comes next")
    count = whole_number(call.meta, "tokens", MAX_COUNT)
    total = whole_number(call.meta, "total", MAX_COUNT)
    done = lane.tokens if call.micro else 0
    if not count or done + count > total or (call.micro and total != lane.total):
        raise refused(f"its {count} tokens after {done} are no part of a step of {total}")


def _check_backward(lane: Lane, call: Call, mode: Mode) -> None:
    if mode != "u-shape":
        raise refused(f"mode {mode} has no backward calls")
    if call.micro != lane.back or call.micro not in lane.graphs:
        raise refused(f"no backward of micro-batch {call.micro} is awaited")


def _check_step(lane: Lane, call: Call, mode: Mode) -> None:
    count = whole_number(call.meta, "tokens", MAX_COUNT)
    micros = whole_number(call.meta, "micros", MAX_COUNT)
    if (count, micros, count) != (lane.tokens, lane.micro, lane.total):
        raise refused(
            f"it closes a step of {micros} micro-batches and {count} tokens, and "
            f"{lane.micro} with {lane.tokens} of {lane.total} were seen"
        )
    if mode == "u-shape" and lane.back != lane.micro:
        raise refused(f"{lane.micro - lane.back} backward calls are missing before the step")
    finite_number(call.meta.get("position"), "position")
    norms_in(call.meta)


_CHECKS: dict[str, Callable[[Lane, Call, Mode], None]] = {
    "forward": _check_forward,
    "backward": _check_backward,
    "step": _check_step,
}


def norms_in(meta: Mapping[str, Any]) -> tuple[list[float], list[float]]:
    """Norms of the site's gradients below and above the cloud's, or ``CallFailed``."""
    norms = meta.get("norms", {})
    found = []
    for role in ("bottom", "top"):
        values = norms.get(role, []) if isinstance(norms, Mapping) else None
        if not isinstance(values, list) or len(values) > _MAX_NORMS:
            raise refused(f"its norms of the {role} are no list of numbers")
        found.append([abs(finite_number(value, "norm")) for value in values])
    return found[0], found[1]
