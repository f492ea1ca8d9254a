"""The process in which the cloud's half of a split model trains.

The coordinator's strategy starts ``python -m flower_geo.cloud`` and tells it by lines of
JSON what to do; sites dial in over ``flower_geo.transport``.
"""

from __future__ import annotations

__all__: list[str] = []
