"""The end of a run: the last evaluation, export and report, or the reason for none."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from flower_geo.errors import FlowerGeoError
from flower_geo.observe import write_report
from flower_geo.strategies.comparison import card_rows, figures_named
from flower_geo.strategies.session import RunSession

__all__ = ["fail", "finish"]

logger = logging.getLogger("flwr")


def finish(session: RunSession) -> None:
    """Evaluate the final model, export it, and write the report."""
    done, figures = session.done, session.figures
    measured = session.engine.evaluate(
        done, lambda record: session.request(record, round=done, evaluate=True)
    )
    figures.losses(done, measured)
    session.writer.wait()
    master, folder = session.master, session.folder.path / "model"
    server = _server_columns(session, master)
    whole = figures.comparison(done, measured, server)
    if not folder.exists():
        session.model.export(master, folder, session.facts())
    session.model.describe(folder, session.facts() | card_rows(whole, server))
    _end(session, "completed", "", sample=session.model.sample(master))


def fail(session: RunSession, reason: str) -> None:
    """Say why the run ends; what was committed stays."""
    try:
        session.writer.wait()
    except FlowerGeoError as error:
        logger.error("the newest commit could not be written: %s", error)
    logger.error("flower-geo: %s", reason)
    try:
        _end(session, "failed", " ".join(reason.split()))
    except FlowerGeoError as error:
        # On a full disk the log cannot take the end either; the reason stands above.
        logger.error("the end of the run could not be written down: %s", error)


def _server_columns(session: RunSession, master: Mapping[str, Tensor]) -> dict[str, Any]:
    """Base and finished model on the coordinator's own set; empty where it has none."""
    version, last = session.figures.served
    if version != session.done:
        if not (last := session.model.measure(master)):
            return {}
        session.figures.server(session.done, last)
    first = session.model.measure(session.model.weights())
    return {"base": figures_named(first), "federated": figures_named(last)}


def _end(session: RunSession, status: str, reason: str, sample: str = "") -> None:
    path = session.folder.path
    session.emit(
        "end", status=status, reason=reason, rounds=session.done,
        seconds=time.monotonic() - session.started, sample=sample,
        model_dir=str(path / "model"), run_dir=str(path),
    )  # fmt: skip
    write_report(path)
