"""The ``plan-split`` command: a plan measured and put into words and tables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flower_geo.errors import ConfigError
from flower_geo.launch.plan import (
    Line,
    Plan,
    Speeds,
    StepTime,
    make_plan,
    pays_from,
    step_time,
    whole_time,
)
from flower_geo.launch.tables import markdown_table
from flower_geo.observe.units import format_bytes, format_count

__all__ = [
    "PlanOptions",
    "Planned",
    "encoded_size",
    "facts",
    "line_rows",
    "plan",
    "readme_table",
    "verdict",
]

#: Lines of ``--table``: round trip in ms, Mbit/s.
LINES = ((10, 1000), (10, 100), (50, 1000), (50, 100), (50, 20), (200, 100), (200, 20))
HEADS = ("round trip, Mbit/s", "split step", "tokens/s", "pace set by", "against whole")

#: Values encoded to learn what a codec makes of them.
_ENCODED = 2**22


@dataclass(frozen=True)
class PlanOptions:
    """What is planned.

    Attributes:
        model: named shape, folder, GGUF file or hub name; only its config is read.
        bottom: layers at the site below the cloud's.
        top: above them.
        length: tokens a sequence.
        batch: sequences a micro-batch.
        micro_batches: a step.
        in_flight: micro-batches on the way at most; 0 = all of a step.
        activations: codec spec of activations.
        gradients: codec spec of gradients.
        rank: of the LoRA adapter on every linear layer.
        site_gflops: speed of training at the site, 10⁹ FLOP/s; 0 = measure this machine.
        cloud_gflops: of the cloud; 0 = as fast as the site.
        site_memory: bytes the site has; 0 = not said.
    """

    model: str
    bottom: int = 1
    top: int = 0
    length: int = 512
    batch: int = 8
    micro_batches: int = 8
    in_flight: int = 0
    activations: str = "int8(block=64)"
    gradients: str = "int8(block=64)"
    rank: int = 16
    site_gflops: float = 0.0
    cloud_gflops: float = 0.0
    site_memory: int = 0


@dataclass(frozen=True)
class Planned:
    """The plan and the speeds it reckons with.

    Attributes:
        options: as given.
        plan: work, bytes and memory.
        speeds: of both sides.
        measured: whether the site's speed is this machine's.
    """

    options: PlanOptions
    plan: Plan
    speeds: Speeds
    measured: bool

    @property
    def whole(self) -> float:
        """Seconds of a step of the whole model at the site."""
        return whole_time(self.plan.work, self.speeds, self.plan.micro_batches)

    def over(self, rtt_ms: float, mbit: float) -> StepTime:
        """A step over a line that is equally fast both ways.

        Raises:
            ConfigError: there is no such line.
        """
        if not (math.isfinite(rtt_ms) and math.isfinite(mbit) and rtt_ms >= 0 and mbit > 0):
            raise ConfigError(
                f"a line of {rtt_ms:g} ms and {mbit:g} Mbit/s carries nothing; "
                "use 0 ms or more, and more than 0 Mbit/s"
            )
        work, plan = self.plan.work, self.plan
        line = Line(rtt_ms / 1000, mbit * 125_000, mbit * 125_000)
        return step_time(work, self.speeds, line, plan.micro_batches, plan.in_flight)


def plan(options: PlanOptions) -> Planned:
    """Size the parts, encode a sample, measure this machine where no speed is given.

    Raises:
        FlowerGeoError: the model, the cut, a codec or a number is not usable.
    """
    from flower_geo.models import AdapterSpec
    from flower_geo.models.speed import layer_speed
    from flower_geo.models.split import Cut, part_sizes

    for name, value in (
        ("site-gflops", options.site_gflops), ("cloud-gflops", options.cloud_gflops),
        ("site-memory", options.site_memory),
    ):  # fmt: skip
        if not math.isfinite(value) or value < 0:
            raise ConfigError(f"{name} {value:g} is no number from 0; leave it out to measure")
    cut = Cut(options.bottom, options.top)
    sizes = part_sizes(options.model, cut, AdapterSpec(rank=options.rank))
    shape = (options.batch, options.length, sizes["whole"].width)
    made = make_plan(
        sizes, options.length, options.batch, options.micro_batches,
        encoded_size(options.activations, shape), encoded_size(options.gradients, shape),
        options.in_flight,
    )  # fmt: skip
    measured = not options.site_gflops
    site = options.site_gflops * 1e9
    if measured:
        site = layer_speed(options.model, options.length, options.batch)
    cloud = options.cloud_gflops * 1e9 or site
    return Planned(options, made, Speeds(site, cloud), measured)


def encoded_size(spec: str, shape: tuple[int, int, int]) -> int:
    """Bytes of an encoded tensor of normal values [batch, n, d]; a large one is scaled up.

    Raises:
        CodecSpecError: the spec cannot be read.
    """
    import torch

    from flower_geo.compression import codec

    chosen = codec(spec)
    batch, length, width = shape
    whole = batch * length * width
    if min(shape) < 1:
        return 0
    rows = max(1, min(batch * length, _ENCODED // width))
    drawn = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    return math.ceil(len(chosen.encode(drawn)) * (whole / drawn.numel()))


def facts(planned: Planned) -> list[tuple[str, str, str]]:
    """Rows (what, split, whole model at the site) that do not depend on the line."""
    made, speeds = planned.plan, planned.speeds
    work, count = made.work, made.micro_batches

    def flops(value: float) -> str:
        return f"{format_count(value * count)}FLOP"

    def pace(value: float) -> str:
        return f"{format_count(value)}FLOP/s"

    source = "measured here" if planned.measured else "given"
    cloud = "given" if planned.options.cloud_gflops else "taken as the site's"
    return [
        ("memory at the site", format_bytes(made.split_memory), format_bytes(made.whole_memory)),
        ("work at the site, a step", flops(work.site), flops(work.whole)),
        ("work in the cloud, a step", flops(work.cloud), "–"),
        ("bytes to the cloud, a step", format_bytes(made.up), "–"),
        ("bytes to the site, a step", format_bytes(made.down), "–"),
        (f"speed of the site ({source})", pace(speeds.site), pace(speeds.site)),
        (f"speed of the cloud ({cloud})", pace(speeds.cloud), "–"),
    ]


def line_rows(planned: Planned, lines: Sequence[tuple[float, float]]) -> list[tuple[str, ...]]:
    """A row a line (round trip in ms, Mbit/s), under ``HEADS``."""
    rows: list[tuple[str, ...]] = []
    for rtt, mbit in lines:
        step = planned.over(rtt, mbit)
        rows.append(
            (
                f"{rtt:g} ms, {mbit:g}", _seconds(step.total),
                format_count(planned.plan.tokens / step.total), step.slowest,
                f"{planned.whole / step.total:.3g}×",
            )
        )  # fmt: skip
    alone = format_count(planned.plan.tokens / planned.whole)
    rows.append(("whole model at the site", _seconds(planned.whole), alone, "site", "1×"))
    return rows


def verdict(planned: Planned, rtt: float, mbit: float) -> str:
    """One line in plain words: whether it pays over this line, and from which on."""
    step, made = planned.over(rtt, mbit), planned.plan
    ratio, have = planned.whole / step.total, planned.options.site_memory
    saved = f"{format_bytes(made.split_memory)} instead of {format_bytes(made.whole_memory)}"
    if have and made.split_memory > have:
        return (
            f"It does not fit: the site has {format_bytes(have)} and its parts need "
            f"{format_bytes(made.split_memory)}; keep fewer layers there, or smaller batches."
        )
    if have and made.whole_memory > have:
        return (
            f"It pays: the whole model does not fit the site ({saved}); a split step takes "
            f"{_seconds(step.total)}, its pace set by {_what(step)}."
        )
    since = pays_from(made.work, planned.speeds, rtt / 1000, made.micro_batches, made.in_flight)
    limit = (
        f"at {rtt:g} ms from {since:.3g} Mbit/s on"
        if since is not None
        else f"at {rtt:g} ms over no line"
    )
    if ratio > 1:
        return (
            f"It pays: a split step is {ratio:.3g} times as fast as the whole model at the site "
            f"(faster {limit}), and the site needs {saved}."
        )
    return (
        f"It does not pay in time: a split step takes {1 / ratio:.3g} times as long as the whole "
        f"model at the site, its pace set by {_what(step)} (faster {limit}); what it saves is "
        f"memory at the site, {saved}."
    )


def readme_table(planned: Planned, lines: Sequence[tuple[float, float]] = LINES) -> str:
    """The plan over several lines as Markdown."""
    return markdown_table(HEADS, line_rows(planned, lines))


def _what(step: StepTime) -> str:
    return {"waiting": "too few micro-batches on the way"}.get(step.slowest, f"the {step.slowest}")


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
