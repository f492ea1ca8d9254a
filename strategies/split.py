"""Split learning: sites train the bottom of a model, the cloud trains the middle in the stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from flwr.app import ArrayRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor

from flower_geo.aggregation import Contribution
from flower_geo.config import SplitConfig
from flower_geo.errors import NotEnoughSites
from flower_geo.models import adapter_state
from flower_geo.models.split import Cut, check_cut, split_parts
from flower_geo.resilience import RunFolder, SpooledReply
from flower_geo.strategies.adapter import AdapterModel
from flower_geo.strategies.cloud import CloudProcess
from flower_geo.strategies.fedavg_lora import FedAvgLoRA
from flower_geo.strategies.terms import Terms

__all__ = ["SplitFineTune", "SplitModel"]

#: Prefix of the cloud's optimizer state among the outer state.
_CLOUD = "cloud/"


class SplitModel(AdapterModel):
    """The whole adapted model at the coordinator, and which of its tensors the cloud trains."""

    config: SplitConfig

    @cached_property
    def cut(self) -> Cut:
        """Where the model is cut."""
        return Cut(self.config.cut_bottom, self.config.cut_top)

    @cached_property
    def cloud_names(self) -> frozenset[str]:
        """Names of the adapter's tensors in the cloud's half."""
        middle: Any = split_parts(self.model, self.cut)["middle"].model
        return frozenset(adapter_state(middle))

    def prepare(self) -> None:
        """Refuse a cut that the model does not have, before anybody is asked."""
        super().prepare()
        check_cut(self.model.config, self.cut)


class SplitFineTune(FedAvgLoRA):
    """Fine-tuning of a model cut in two (arXiv:1812.00564; U-shape, SplitFed, CSE-FSL, FSL-SAGE).

    Sent down: the sites' part of the adapter, and where they dial in.  In the stream:
    activations and gradients of each micro-batch.  Sent up: what a site made of its
    part; these are averaged by the rule of ``aggregation``, and the cloud's part is what
    the stream made of it.

    Args:
        config: a checked configuration; by default made from ``options``.
        options: configuration keys in Python spelling (``mode="vanilla"``).

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    config: SplitConfig
    model: SplitModel
    kinds = (SplitConfig, SplitModel)

    def __init__(self, config: SplitConfig | None = None, **options: Any) -> None:
        super().__init__(config, **options)
        self._cloud: CloudProcess | None = None
        self._half: Mapping[str, Tensor] = {}
        self._half_moments: dict[str, Tensor] = {}

    def terms(self) -> Terms:
        """The cloud's part of the adapter stays here; requests carry where the stream is."""
        return Terms(
            type(self).__name__, self.model, self._part,
            kept=lambda name: name in self.model.cloud_names, hold=self._hold,
            convene=self._convene, stream=self._ticket,
        )  # fmt: skip

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, **kwargs: Any) -> Result:
        """See ``GeoStrategy.start``; the cloud's process ends with the run."""
        try:
            return super().start(grid, initial_arrays, *args, **kwargs)
        finally:
            if self._cloud is not None:
                self._cloud.close()
                self._cloud = None

    def next_model(
        self,
        master: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        replies: Sequence[Contribution],
    ) -> dict[str, Tensor]:
        """Return the sites' part, averaged, and the cloud's as the stream left it."""
        following = super().next_model(master, base, replies)
        spooled = [reply for reply in replies if isinstance(reply, SpooledReply)]
        weights = {reply.meta.site: reply.weight for reply in spooled}
        half, self._half_moments = self._process().settle(weights)
        return following | half

    def outer_state(self) -> dict[str, Tensor]:
        """Moments of the server optimizer and of the cloud's half."""
        mine = {_CLOUD + name: tensor for name, tensor in self._half_moments.items()}
        return super().outer_state() | mine

    def load_outer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`outer_state` gave."""
        mine = {name: t for name, t in state.items() if name.startswith(_CLOUD)}
        super().load_outer_state({name: t for name, t in state.items() if name not in mine})
        self._half_moments = {name.removeprefix(_CLOUD): t for name, t in mine.items()}

    def _retried(self, session: Any) -> Any:
        """See ``GeoStrategy``; where the cloud's half fails, that is the reason."""
        try:
            return super()._retried(session)
        except NotEnoughSites:
            failure = self._process().failure
            if failure is None:
                raise
            raise failure from None

    # -- the cloud's process ------------------------------------------------------

    def _hold(self, folder: RunFolder, kept: Mapping[str, Tensor]) -> None:
        self._half = kept
        if self._cloud is None:
            run = f"{self.config.run_name}-{folder.uid}"
            self._cloud = CloudProcess(self.config, folder.path, run)

    def _process(self) -> CloudProcess:
        assert self._cloud is not None, "the session holds the cloud's part first"
        return self._cloud

    def _convene(self, round: int, attempt: int, sites: Sequence[str]) -> None:
        self._process().begin(round, attempt, sites, self._half, self._half_moments)

    def _ticket(self, round: int, site: str) -> str:
        if not self._process().begun:  # nothing is left to train, only to evaluate
            self._convene(round, 0, ())
        return self._process().ticket(round, site)
