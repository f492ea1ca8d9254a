"""``GeoStrategy``: rounds over institutions, on the shared layers.

A strategy derived from it says what replies become (`next_model`) and what of
its own must live on (`outer_state`).  Everything else, from who is asked to
what survives a crash, is wired here and done by the layers below.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from torch import Tensor

from flower_geo.aggregation import Contribution
from flower_geo.compression import codec, pack
from flower_geo.config import CommonConfig
from flower_geo.errors import FlowerGeoError, NotEnoughSites
from flower_geo.strategies.ending import fail, finish
from flower_geo.strategies.links import check_codecs
from flower_geo.strategies.model import RunModel
from flower_geo.strategies.session import RunSession
from flower_geo.strategies.terms import Terms

__all__ = ["GeoStrategy"]

logger = logging.getLogger("flwr")


class GeoStrategy(Strategy):
    """Base of the strategies; see the module text.

    Args:
        config: the run's checked configuration.
    """

    def __init__(self, config: CommonConfig) -> None:
        # Both are read before anything starts, so that a typo ends at once.
        check_codecs(config)
        self.config = config
        #: The round whose replies become the next model.
        self.round = 0

    # -- what a strategy defines ----------------------------------------------

    @abstractmethod
    def next_model(
        self,
        master: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        replies: Sequence[Contribution],
    ) -> dict[str, Tensor]:
        """Return the next master weights.

        Args:
            master: the server's fp32 weights.
            base: the fp32 weights the sites trained from.
            replies: accepted updates, in site order.

        Returns:
            New tensors; ``master`` and ``base`` are not changed, since a
            checkpoint of them may still be on its way to disk.
        """

    def outer_state(self) -> dict[str, Tensor]:
        """Tensors of the strategy's own that a checkpoint must hold."""
        return {}

    def load_outer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`outer_state` gave."""

    def terms(self) -> Terms:
        """What the strategy lays down for its session."""
        return Terms(type(self).__name__, RunModel(self.config))

    def round_figures(self) -> dict[str, Any]:
        """Figures of the newest :meth:`next_model` for the metrics log; empty for none."""
        return {}

    # -- the run --------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 0,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run, or resume, until ``num_rounds`` rounds are committed.

        Args:
            grid: Flower's grid.
            initial_arrays: initial weights; ignored when the run folder holds a
                checkpoint.
            num_rounds: rounds in all; the configuration's when 0.
            timeout: upper bound of a round's deadline, seconds.
            train_config: not used; the configuration is.
            evaluate_config: not used; the configuration is.
            evaluate_fn: evaluates the committed model on the server.

        Raises:
            NotEnoughSites: too few sites connected or answered.
            StateError: the run folder cannot be used, or belongs to another run.
            FlowerGeoError: anything else that ends the run; what was committed
                stays.
        """
        if num_rounds and num_rounds != self.config.rounds:
            self.config = self.config.model_copy(update={"rounds": num_rounds})
        if timeout < self.config.deadline:
            self.config = self.config.model_copy(update={"deadline": timeout})
        result = Result()
        with RunSession.open(self.config, self.terms(), grid) as session:
            try:
                session.restore(initial_arrays, self.load_outer_state, self.outer_state)
                self._rounds(session, result, evaluate_fn)
                finish(session)
            except FlowerGeoError as error:
                fail(session, str(error))
                raise
        result.arrays = pack(session.master, codec("fp32"))
        return result

    def _rounds(
        self,
        session: RunSession,
        result: Result,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None,
    ) -> None:
        if session.done < self.config.rounds:
            session.assemble()
        while session.done < self.config.rounds:
            outcome = self._retried(session)
            self.round = session.done + 1
            following = session.fold(self.next_model, outcome)
            session.commit(following, self.outer_state(), outcome)
            if figures_of_it := self.round_figures():
                session.emit("aggregation", round=session.done, **figures_of_it)
            round, figures = session.done, session.figures
            result.train_metrics_clientapp[round] = MetricRecord({**figures.train_metrics})
            if figures.evaluated is not None:
                measured, loss = figures.evaluated
                result.evaluate_metrics_clientapp[measured] = MetricRecord({"loss": loss})
            if evaluate_fn is not None:
                arrays = pack(session.master, codec("fp32"))
                metrics = evaluate_fn(round, arrays)
                if metrics is not None:
                    result.evaluate_metrics_serverapp[round] = metrics

    def _retried(self, session: RunSession) -> Any:
        """A round with enough good replies, tried ``max-retries`` times more."""
        for attempt in range(1, self.config.max_retries + 2):
            outcome = session.gather(attempt)
            good = len(outcome.replies)
            if good >= self.config.min_sites:
                return outcome
            logger.warning(
                "round %d, try %d: %d good replies of min-sites=%d",
                session.done + 1, attempt, good, self.config.min_sites,
            )  # fmt: skip
            if attempt <= self.config.max_retries:
                session.back_off(attempt)
        away = ", ".join(session.membership.in_quarantine(session.done + 1))
        raise NotEnoughSites(
            f"round {session.done + 1} had fewer than min-sites={self.config.min_sites} good "
            f"replies in {self.config.max_retries + 1} tries"
            + (f" (in quarantine: {away})" if away else "")
            + f"; rounds up to {session.done} are committed: bring sites back and run again, "
            "or lower min-sites"
        )

    def summary(self) -> None:
        """Log the resolved configuration."""
        for key, value in self.config.public().items():
            logger.info("\t%s = %s", key, value)

    # -- Flower's own loop ----------------------------------------------------
    # `start` replaces the loop these four belong to: it needs replies one by
    # one as they come, which `send_and_receive` cannot give.

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not used; see :meth:`start`."""
        self._own_loop()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Not used; see :meth:`start`."""
        self._own_loop()

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Not used; see :meth:`start`."""
        self._own_loop()

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Not used; see :meth:`start`."""
        self._own_loop()

    def _own_loop(self) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} runs its own round loop: call start(grid, arrays, num_rounds)"
        )
