"""Federated LoRA, an institution's side: training requests are served by ``flower_geo.site``."""

from __future__ import annotations

from flower_geo.site import client_app

app = client_app()
