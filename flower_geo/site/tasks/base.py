"""What a way of training is at a site: a model, data, what is trained and what is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from flower_geo.compression import Growing
from flower_geo.data import Cursor
from flower_geo.messages import Request
from flower_geo.training import InnerLoop

__all__ = ["Alone", "Comparison", "Task"]


class Comparison(Protocol):
    """What the federated model is compared with at a site: the base, and the site alone.

    Alone, a site takes the same steps on the same examples in the same order, from the
    same beginning; only nothing of it is ever averaged.

    Attributes:
        trains_alone: whether the site takes those steps too, or only measures the base.
    """

    @property
    def trains_alone(self) -> bool:
        """See the class."""

    def load(self, state: Mapping[str, Tensor], round: int) -> None:
        """Put what the site has alone into the model, as trained in ``round``; {} = version 0."""

    def state(self) -> dict[str, Tensor]:
        """What the site has alone, as it is in the model now."""

    def loop(self) -> InnerLoop:
        """A loop over the model's trained parameters."""


class Task(Protocol):
    """One site's part in a way of training.

    A *version* is what the coordinator broadcasts; its tensors are in the wire's form,
    which need not be the model's.

    Attributes:
        model: what is trained.
        growing: names of a version's tensors that may come and go.
        initial_hash: content hash of version 0, where the site can make it by itself.
        tokenizer_hash, identity: what the coordinator compares with its own.
        data_name, data_fingerprint: the site's data, for people and for snapshots.
        sequences: training sequences, for the cursor.
        together: whether a round is one of several parties, which may have to go back
            to a step that all of them still have.
        comparison: what a finished run is compared with; None where it is not.
    """

    model: nn.Module
    growing: Growing
    initial_hash: str
    tokenizer_hash: str
    identity: str
    data_name: str
    data_fingerprint: str
    sequences: int
    together: bool

    @property
    def comparison(self) -> Comparison | None:
        """See the class."""

    def initial(self) -> dict[str, Tensor]:
        """Version 0."""

    def schema(self) -> dict[str, Tensor]:
        """Tensors with the names and shapes of a version, growing ones left out."""

    def sizes(self) -> dict[str, float]:
        """Figures of the site's data for the greeting."""

    def load(
        self,
        base: Mapping[str, Tensor],
        round: int,
        personal: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Put a version into the model, as it is to be trained in ``round``.

        ``personal`` gives what :meth:`personal` gave after the round before.
        """

    def trained_from(self, base: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The part of a version that an update of this round is taken against."""

    def local(self) -> dict[str, Tensor]:
        """What training made of that part: the same names and shapes."""

    def personal(self) -> dict[str, Tensor]:
        """Trained tensors that never leave the site."""

    def meet(self, request: Request, site: str, steps: Sequence[int] | None) -> int | None:
        """Find the others of the round.

        Args:
            request: that asks for the round, or for an evaluation.
            site: this one.
            steps: of the round, that there is a snapshot of; None to evaluate only.

        Returns:
            The step that all go on after; None where a site works by itself.

        Raises:
            SplitError: they are not to be had.
        """

    def close(self) -> None:
        """The request is answered."""

    def loop(self) -> InnerLoop:
        """A loop over the model's trained parameters."""

    def batches(self, cursor: Cursor) -> Callable[[], Any]:
        """Makes one batch a call, on the model's device."""

    def held_out(self) -> dict[str, float]:
        """``loss`` a token, ``eval-tokens``, and more of the site's held-out data."""


class Alone:
    """The part of a task that is that of a site which needs no other in a round."""

    together = False

    def meet(self, request: Request, site: str, steps: Sequence[int] | None) -> int | None:
        """Nobody is to be met."""
        return None

    def close(self) -> None:
        """Nothing is held open."""
