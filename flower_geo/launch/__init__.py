"""Helpers of the ``flower-geo`` command: processes, local clusters, submitted runs, the doctor.

Nothing here imports torch, and nothing is imported before it is used, so that
the command answers at once.
"""

from __future__ import annotations

from flower_geo.launch.cluster import LocalCluster
from flower_geo.launch.simulation import PrivateSimulation
from flower_geo.launch.supervisor import Outcome, RunRequest, supervise

__all__ = ["LocalCluster", "Outcome", "PrivateSimulation", "RunRequest", "supervise"]
