"""Split learning: the site's half and the cloud's half of a model train each other.

The site drives: its :class:`SplitLoop` makes calls (``flower_geo.calls``) over any
:class:`Channel`, and a :class:`CloudEngine` answers them, for all sites of a round.
"""

from __future__ import annotations

from flower_geo.training.split.engine import CloudEngine
from flower_geo.training.split.lane import Reply, Traffic
from flower_geo.training.split.loop import SplitLoop
from flower_geo.training.split.modes import MODES, Auxiliary, Mode, check_mode
from flower_geo.training.split.site import SAMPLES, Channel, SiteHalf
from flower_geo.training.split.wire import Wire

__all__ = [
    "MODES",
    "SAMPLES",
    "Auxiliary",
    "Channel",
    "CloudEngine",
    "Mode",
    "Reply",
    "SiteHalf",
    "SplitLoop",
    "Traffic",
    "Wire",
    "check_mode",
]
