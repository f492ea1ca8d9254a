"""A round of the cloud's half as named tensors and a JSON object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from flower_geo.errors import TrainingError
from flower_geo.training.split.half import Half
from flower_geo.training.split.lane import Lane

__all__ = ["Place", "engine_state", "load_engine_state", "under"]

#: Raised by one whenever an older state cannot be gone on from.
_VERSION = 1


@dataclass(frozen=True)
class Place:
    """Where a round stands in the run.

    Attributes:
        round: its number; 0 = none has begun.
        position: schedule position of its start.
        span: schedule steps it stands for.
        steps: of each site; None = no set number.
    """

    round: int = 0
    position: float = 0.0
    span: float = 0.0
    steps: int | None = None

    def within(self, position: float) -> float:
        """A position a site told, held within the round."""
        return min(max(position, self.position), self.position + self.span)


def under(state: Mapping[str, Tensor], lead: str) -> dict[str, Tensor]:
    """Entries whose names begin with ``lead``, without it."""
    return {k.removeprefix(lead): v for k, v in state.items() if k.startswith(lead)}


def engine_state(
    mode: str, place: Place, half: Half, lanes: Mapping[str, Lane]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors ``half/...`` and ``lane/<index>/{half,rng,wire}/...``, and the rest as JSON."""
    tensors = {f"half/{name}": tensor for name, tensor in half.state().items()}
    told: dict[str, Any] = {}
    for index, (site, lane) in enumerate(lanes.items()):
        told[site] = {
            "step": lane.step, "trained": lane.trained,
            "finished": lane.finished, "gone": lane.gone,
        }  # fmt: skip
        parts = {"rng": lane.stream.state(), "wire": lane.wire.state()}
        if lane.half is not half:
            parts["half"] = lane.half.state()
        for part, state in parts.items():
            tensors |= {f"lane/{index}/{part}/{name}": t for name, t in state.items()}
    meta = {"version": _VERSION, "mode": mode, "place": asdict(place), "lanes": told}
    return tensors, meta


def load_engine_state(
    tensors: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    mode: str,
    half: Half,
    lane_of: Callable[[str], Lane],
) -> tuple[Place, dict[str, Lane]]:
    """The round and the lanes of a state; ``half`` takes its weights.

    Raises:
        TrainingError: the state is of another mode or model, or not whole.
    """
    try:
        if (meta["version"], meta["mode"]) != (_VERSION, mode):
            raise TrainingError(
                f"the saved state is of mode {meta['mode']} and version {meta['version']}, not "
                f"{mode} and {_VERSION}; begin the round anew"
            )
        place = Place(**meta["place"])
        half.load(under(tensors, "half/"))
        lanes: dict[str, Lane] = {}
        for index, (site, told) in enumerate(meta["lanes"].items()):
            lane = lane_of(site)
            lane.step, lane.trained = int(told["step"]), int(told["trained"])
            lane.finished, lane.gone = bool(told["finished"]), bool(told["gone"])
            lane.stream.load(under(tensors, f"lane/{index}/rng/"))
            lane.wire.load(under(tensors, f"lane/{index}/wire/"))
            if lane.half is not half:
                lane.half.load(under(tensors, f"lane/{index}/half/"))
            lanes[site] = lane
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainingError(f"the saved state of the cloud's half is not whole: {error}") from None
    return place, {site: lanes[site] for site in sorted(lanes)}
