"""What a run tells people: metrics log, live progress, and a report page."""

from __future__ import annotations

from flower_geo.observe.baselines import BaselineBytes, baseline_bytes
from flower_geo.observe.comparison import comparison_lines
from flower_geo.observe.metrics import MetricsLog, follow, read_metrics
from flower_geo.observe.progress import Progress
from flower_geo.observe.report import write_report

__all__ = [
    "BaselineBytes",
    "MetricsLog",
    "Progress",
    "baseline_bytes",
    "comparison_lines",
    "follow",
    "read_metrics",
    "write_report",
]
