"""What a run's rounds measured, as events of the metrics log and lines for people."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flower_geo.observe import comparison_lines
from flower_geo.resilience import Emit, Measured, Membership, RoundOutcome
from flower_geo.strategies.comparison import compared, figures_named

__all__ = ["Figures"]

logger = logging.getLogger("flwr")


class Figures:
    """Reports evaluations and rounds, and keeps the newest.

    Args:
        emit: takes events for the metrics log.
        membership: sites by name.
        rounds: rounds planned.

    Attributes:
        train_metrics: numbers of the newest committed round.
        evaluated: (version, held-out loss of the whole) measured last, or None.
        served: (version, figures) measured last on the coordinator's own set.
        seconds_fold: time the newest round took to become a model.
    """

    def __init__(self, emit: Emit, membership: Membership, rounds: int) -> None:
        self._emit = emit
        self._membership = membership
        self._rounds = rounds
        self.train_metrics: dict[str, float] = {}
        self.evaluated: tuple[int, float] | None = None
        self.served: tuple[int, Mapping[str, float]] = (-1, {})
        self.seconds_fold = 0.0
        self._began = time.monotonic()

    def begin(self) -> None:
        """Note that a round begins."""
        self._began = time.monotonic()

    def evaluation(self, version: int, outcome: RoundOutcome) -> None:
        """Held-out loss of the model the round began with, by site and of the whole."""
        measured = [
            Measured(
                reply.meta.site, reply.meta.metrics["loss-before"],
                reply.meta.metrics["eval-tokens"], reply.meta.metrics,
            )
            for reply in outcome.replies
            if "loss-before" in reply.meta.metrics and reply.meta.staleness == 0
        ]  # fmt: skip
        self.losses(version, measured)

    def losses(self, version: int, measured: Sequence[Measured]) -> None:
        """Report held-out figures of that version; nothing when empty."""
        tokens = sum(each.tokens for each in measured)
        if not tokens:
            return
        for each in measured:
            self._emit(
                "eval", round=version, site=each.site, tokens=each.tokens,
                data=self._membership.sites[each.site].data,
                **(figures_named(each.metrics, "-before") | {"loss": each.loss}),
            )  # fmt: skip
        whole = sum(each.loss * each.tokens for each in measured) / tokens
        self._emit("eval", round=version, site="*", loss=whole, tokens=tokens)
        self.evaluated = (version, whole)
        logger.info("held-out loss after %d rounds: %.4f", version, whole)

    def comparison(
        self, version: int, measured: Sequence[Measured], server: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Report base against local-only against federated, by site; the row over all.

        Args:
            version: the finished model's.
            measured: of the sites.
            server: columns of the coordinator's own set; empty for none.
        """
        rows = compared(measured)
        if not rows and not server:
            return {}
        event: dict[str, Any] = {"round": version, "rows": rows, "server": dict(server)}
        self._emit("comparison", **event)
        for line in comparison_lines(event):
            logger.info("%s", line)
        return rows[-1] if rows else {}

    def server(self, version: int, figures: Mapping[str, float]) -> None:
        """Report figures of the coordinator's own set."""
        self.served = version, figures
        self._emit("server", round=version, tokens=figures["eval-tokens"], **figures_named(figures))
        logger.info("loss on the server set after %d rounds: %.4f", version, figures["loss"])

    def round(self, done: int, outcome: RoundOutcome, hash: str, seconds_commit: float) -> None:
        """Report a committed round."""
        replies = outcome.replies
        seconds = time.monotonic() - self._began
        tokens = sum(reply.meta.metrics.get("tokens", 0.0) for reply in replies)
        loss = sum(
            reply.meta.metrics.get("train-loss", 0.0) * reply.meta.metrics.get("tokens", 0.0)
            for reply in replies
        ) / max(tokens, 1.0)
        slowest = max(reply.meta.metrics.get("seconds", 0.0) for reply in replies)
        self.train_metrics = {
            "train-loss": loss, "tokens": tokens, "replies": float(len(replies)),
            "bytes-up": float(outcome.bytes_up), "bytes-down": float(outcome.bytes_down),
        }  # fmt: skip
        self._emit(
            "round", round=done, attempt=outcome.attempt, asked=outcome.asked,
            accepted=len(replies), train_loss=loss,
            tokens=tokens, tokens_per_second=tokens / max(seconds, 1e-9), seconds=seconds,
            seconds_slowest_site=slowest, seconds_fold=self.seconds_fold,
            seconds_commit=seconds_commit, bytes_up=outcome.bytes_up,
            bytes_down=outcome.bytes_down, hash=hash,
        )  # fmt: skip
        logger.info(
            "round %d/%d: %d of %d sites, training loss %.4f, %.0f tokens/s, "
            "%.2f MB up, %.2f MB down",
            done, self._rounds, len(replies), outcome.asked, loss,
            tokens / max(seconds, 1e-9), outcome.bytes_up / 1e6, outcome.bytes_down / 1e6,
        )  # fmt: skip
