"""What runs at an institution."""

from __future__ import annotations

from flower_geo.site.handlers import client_app

__all__ = ["client_app"]
