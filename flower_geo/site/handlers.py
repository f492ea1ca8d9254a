"""The ClientApp: Flower's messages in, the site's work, messages out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flower_geo.errors import FlowerGeoError
from flower_geo.messages import Reply, Request
from flower_geo.site.client import ask_worker, deployed, uses_worker
from flower_geo.site.forerunner import forerunner
from flower_geo.site.identity import site_name
from flower_geo.site.place import Place

__all__ = ["client_app"]

logger = logging.getLogger(__name__)


def client_app() -> ClientApp:
    """Return a Flower ClientApp that serves its site's part of a run.

    It trains in the site's worker process, or in its own (node-config
    ``worker``, see ``flower_geo.site.client``).

    It answers ``query`` (greeting), ``train`` and ``evaluate``.  Errors of
    flower_geo's own kinds come back as a refusal with one line of reason, so
    that the coordinator can show what is wrong where; anything else is left to
    Flower, which reports the exception.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _serve("greet_request", message, context)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _serve("train_request", message, context)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _serve("evaluate_request", message, context)

    return app


def _serve(name: str, message: Message, context: Context) -> Message:
    started = time.perf_counter()
    node: Mapping[str, Any] = context.node_config
    site = "unnamed"
    try:
        site = site_name(node)
        request = Request.from_records(message.content)
        before = forerunner(Place.of(request, node), context.node_id) if deployed() else ""
        reply = replace(_handler(name, node)(request, node), follows=before)
    except FlowerGeoError as error:
        logger.error("site %s: %s", site, error)
        reply = Reply(
            status="refused", site=site, detail=" ".join(str(error).split()),
            error=type(error).__name__,
        )  # fmt: skip
    reply = replace(reply, at_work=time.perf_counter() - started)
    return Message(reply.to_records(), reply_to=message)


def _handler(name: str, node: Mapping[str, Any]) -> Callable[[Request, Mapping[str, Any]], Reply]:
    if uses_worker(node):
        return partial(ask_worker, name)
    # Imported here: a process that has a worker, or reports a bad request, needs no torch.
    from flower_geo.site import work

    handler: Callable[[Request, Mapping[str, Any]], Reply] = getattr(work, name)
    return handler
