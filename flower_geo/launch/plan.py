"""When split training pays: time, memory and bytes of a step, from sizes and speeds.

A step is M micro-batches through a pipeline of four stages: the site (forward,
then backward of its parts), the line up, the cloud, the line down.  With enough
micro-batches on the way the slowest stage sets the pace:

    T_step = fill + (M - 1) · period + step
    fill   = the stages of one micro-batch in turn, and its round trips
    period = max(slowest stage, fill / micro-batches in flight)
    step   = one round trip, in which both sides agree on the norm of the gradient

It is what a pipeline of equal jobs takes at least; the site stands at both ends of
it.  Nothing is counted for the optimizer, framing, or waiting for other sites.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flower_geo.errors import ConfigError

if TYPE_CHECKING:
    from flower_geo.models.split.sizes import PartSize

__all__ = ["Line", "Plan", "Speeds", "StepTime", "Work", "make_plan", "pays_from", "step_time",
           "whole_time"]  # fmt: skip

#: Bytes of a label on the wire, where labels go to the cloud.
LABEL = 4
#: Mbit/s above which a faster line is not looked for.
MAX_MBIT = 1e6


@dataclass(frozen=True)
class Line:
    """A line between site and cloud.

    Attributes:
        rtt: round trip in seconds.
        up: bytes a second towards the cloud.
        down: bytes a second towards the site.
    """

    rtt: float
    up: float
    down: float


@dataclass(frozen=True)
class Speeds:
    """FLOP/s that training reaches at the site and in the cloud."""

    site: float
    cloud: float


@dataclass(frozen=True)
class Work:
    """One micro-batch.

    Attributes:
        site: FLOPs at the site, forward and backward.
        cloud: FLOPs in the cloud.
        whole: FLOPs of the whole model, at a site that trains alone.
        up: bytes to the cloud.
        down: bytes to the site.
        trips: times the site must wait for the cloud, one after the other.
    """

    site: float
    cloud: float
    whole: float
    up: int
    down: int
    trips: int


@dataclass(frozen=True)
class StepTime:
    """How long a step takes, in seconds.

    Attributes:
        total: of the step.
        fill: of one micro-batch by itself.
        period: between two micro-batches once the pipeline is full.
        stages: of one micro-batch in each stage, by name.
        slowest: what sets the pace: a stage, or "waiting" for too few in flight.
    """

    total: float
    fill: float
    period: float
    stages: Mapping[str, float]
    slowest: str


def step_time(
    work: Work, speeds: Speeds, line: Line, micro_batches: int, in_flight: int = 0
) -> StepTime:
    """Time of a step of ``micro_batches``, at most ``in_flight`` (0 = all) on the way at once."""
    stages = {
        "site": work.site / speeds.site,
        "line up": work.up / line.up,
        "cloud": work.cloud / speeds.cloud,
        "line down": work.down / line.down,
    }
    fill = sum(stages.values()) + work.trips * line.rtt
    slowest = max(stages, key=lambda name: stages[name])
    flying = min(in_flight or micro_batches, micro_batches)
    period = stages[slowest]
    if flying < micro_batches and fill / flying > period:
        period, slowest = fill / flying, "waiting"
    total = fill + (micro_batches - 1) * period + line.rtt
    return StepTime(total, fill, period, stages, slowest)


def whole_time(work: Work, speeds: Speeds, micro_batches: int) -> float:
    """Seconds of the same step where the site trains the whole model by itself."""
    return micro_batches * work.whole / speeds.site


def pays_from(
    work: Work, speeds: Speeds, rtt: float, micro_batches: int, in_flight: int = 0
) -> float | None:
    """The line in Mbit/s, equal both ways, from which a split step is the faster one.

    Returns:
        Mbit/s to within 1 %; None where no line is fast enough.
    """
    alone = whole_time(work, speeds, micro_batches)

    def faster(mbit: float) -> bool:
        line = Line(rtt, mbit * 125_000, mbit * 125_000)
        return step_time(work, speeds, line, micro_batches, in_flight).total < alone

    low, high = 1e-3, MAX_MBIT
    if not faster(high):
        return None
    while high > 1.01 * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if faster(middle) else (middle, high)
    return high


@dataclass(frozen=True)
class Plan:
    """A cut, its work and its memory.

    Attributes:
        work: of one micro-batch.
        micro_batches: a step.
        in_flight: micro-batches on the way at most; 0 = all.
        split_memory: bytes at the site with its parts.
        whole_memory: bytes at the site with the whole model.
        tokens: a step.
    """

    work: Work
    micro_batches: int
    in_flight: int
    split_memory: int
    whole_memory: int
    tokens: int

    @property
    def up(self) -> int:
        """Bytes a step to the cloud."""
        return self.work.up * self.micro_batches

    @property
    def down(self) -> int:
        """Bytes a step to the site."""
        return self.work.down * self.micro_batches


def make_plan(
    sizes: Mapping[str, PartSize],
    length: int,
    batch: int,
    micro_batches: int,
    activations: int,
    gradients: int,
    in_flight: int = 0,
) -> Plan:
    """Work and memory of a cut.

    Args:
        sizes: of the parts and the whole, as ``part_sizes`` gives them.
        length: tokens a sequence.
        batch: sequences a micro-batch.
        micro_batches: a step.
        activations: bytes of one encoded tensor [batch, length, width] of activations.
        gradients: the same of a gradient.
        in_flight: micro-batches on the way at most; 0 = all.

    Raises:
        ConfigError: a number is below what makes a step.
    """
    for name, value, least in (
        ("seq-len", length, 2), ("batch-size", batch, 1), ("micro-batches", micro_batches, 1),
        ("in-flight", in_flight, 0),
    ):  # fmt: skip
        if value < least:
            raise ConfigError(f"{name} {value} makes no step; use {least} or more")
    tokens = batch * length

    def flops(part: PartSize) -> float:
        return tokens * (part.forward_flops(length) + part.backward_flops(length))

    u_shape = "top" in sizes
    at_site = [sizes[role] for role in ("bottom", "top") if role in sizes]
    # Vanilla: activations and labels up, a gradient down.  U-shape: the hidden states come
    # down as well, and the gradient of the top goes up.
    work = Work(
        site=sum(flops(part) for part in at_site),
        cloud=flops(sizes["middle"]),
        whole=flops(sizes["whole"]),
        up=activations + (gradients if u_shape else LABEL * tokens),
        down=gradients + (activations if u_shape else 0),
        trips=2 if u_shape else 1,
    )
    flying = min(in_flight or micro_batches, micro_batches)
    # The top is through with a micro-batch before it takes the next.
    kept = [sizes["bottom"].memory(tokens * flying)]
    if u_shape:
        top = sizes["top"]
        shared = min(sizes["whole"].head * top.width, top.frozen) if _tied(sizes) else 0
        kept.append(replace(top, frozen=top.frozen - shared).memory(tokens))
    return Plan(
        work, micro_batches, in_flight, sum(kept), sizes["whole"].memory(tokens),
        tokens * micro_batches,
    )  # fmt: skip


def _tied(sizes: Mapping[str, PartSize]) -> bool:
    """Whether embedding and head are one tensor: the parts then hold more than the whole."""
    parts = [size.frozen for role, size in sizes.items() if role != "whole"]
    return sum(parts) > sizes["whole"].frozen
