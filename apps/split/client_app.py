"""Split-learning fine-tuning, an institution's side: ``flower_geo.site`` serves it."""

from __future__ import annotations

from flower_geo.site import client_app

app = client_app()
