"""Fault tolerance: rounds, screening, spool, checkpoints, journal, membership."""

from __future__ import annotations

from flower_geo.resilience.checkpoint import BackgroundWriter, Checkpoint, CheckpointStore
from flower_geo.resilience.evaluation import Measured
from flower_geo.resilience.exchange import Exchange, Incoming
from flower_geo.resilience.intake import Part, whole_base
from flower_geo.resilience.journal import Journal
from flower_geo.resilience.membership import Membership, SiteRecord
from flower_geo.resilience.network import StallWatch
from flower_geo.resilience.policy import Emit, RoundOutcome, RoundPolicy
from flower_geo.resilience.rounds import RoundEngine
from flower_geo.resilience.runfolder import RunFolder
from flower_geo.resilience.screening import Screen
from flower_geo.resilience.spool import Spool, SpooledReply

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "CheckpointStore",
    "Emit",
    "Exchange",
    "Incoming",
    "Journal",
    "Measured",
    "Membership",
    "Part",
    "RoundEngine",
    "RoundOutcome",
    "RoundPolicy",
    "RunFolder",
    "Screen",
    "SiteRecord",
    "Spool",
    "SpooledReply",
    "StallWatch",
    "whole_base",
]
