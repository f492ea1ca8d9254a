"""From a run's configuration to what both halves share beside the inner loop's settings."""

from __future__ import annotations

from flower_geo.config import SplitConfig
from flower_geo.training.split.modes import Auxiliary
from flower_geo.training.split.wire import Wire

__all__ = ["auxiliary_of", "wire_of"]

#: Bytes of references for each site and cut, with delta coding.
_DELTA_BYTES = 256 * 2**20


def wire_of(config: SplitConfig) -> Wire:
    """What hidden states and gradients become on the way."""
    return Wire(
        codec_activations=config.codec_activations, codec_gradients=config.codec_gradients,
        delta_bytes=_DELTA_BYTES if config.delta_coding else 0,
        activation_noise=config.activation_noise,
    )  # fmt: skip


def auxiliary_of(config: SplitConfig) -> Auxiliary:
    """The site's own head, for ``cse`` and ``sage``."""
    return Auxiliary(align_every=config.align_every)
