"""Value codecs: how a run of fp32 values becomes bytes."""

from __future__ import annotations

from flower_geo.compression.floats import BF16, FP16, FP32, PIECE, Floats, ValueCodec
from flower_geo.compression.integers import INT_KEYS, Int, Int2

__all__ = ["BF16", "FP16", "FP32", "INT_KEYS", "PIECE", "Floats", "Int", "Int2", "ValueCodec"]
