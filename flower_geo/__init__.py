"""Train language models across institutions that share no data and no cluster."""

from __future__ import annotations

__version__ = "0.1.0"

__all__ = ["__version__"]
