"""What a way of training lays down for the run's session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from flower_geo.compression import Growing, none_grows
from flower_geo.resilience import Part, RunFolder, whole_base
from flower_geo.strategies.model import RunModel

__all__ = ["Terms"]


@dataclass(frozen=True)
class Terms:
    """What a way of training lays down for its session.

    Attributes:
        name: of the strategy.
        model: makes, checks and exports the model.
        part: what of a base a reply is an update of.
        growing: names of the model's tensors that may come and go.
        kept: names of those that stay with the coordinator and are never sent.
        hold: told where the run lives and what stays with the coordinator, when the run
            begins or goes on, and after each commit.
        convene: told the round, the try and the sites to be asked, before any is asked.
        stream: what a site's request in a round carries for a stream of its own.
    """

    name: str
    model: RunModel
    part: Part = whole_base
    growing: Growing = none_grows
    kept: Callable[[str], bool] = lambda name: False
    hold: Callable[[RunFolder, Mapping[str, Tensor]], None] = lambda folder, kept: None
    convene: Callable[[int, int, Sequence[str]], None] = lambda round, attempt, sites: None
    stream: Callable[[int, str], str] = lambda round, site: ""
