"""Sites that train on one cloud half in one round: they meet, step, go back and end together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from flower_geo.calls import Answer, Call
from flower_geo.cloud.meeting import Meeting
from flower_geo.cloud.store import HalfStore
from flower_geo.errors import HandshakeRefused, SessionLost, SplitError

__all__ = ["Engine", "Group", "Reply"]

logger = logging.getLogger(__name__)

Reply = Callable[[Answer | SplitError], None]


class Engine(Protocol):
    """What trains the half; see ``flower_geo.training.split.CloudEngine``."""

    @property
    def boundary(self) -> int | None:
        """The step that all are at, and nobody in the midst of the next; None where they differ."""

    def submit(self, site: str, call: Call, answer: Reply) -> None:
        """Take a call; it is run by ``work``."""

    def work(self, timeout: float) -> bool:
        """Run one call that may run; whether there was one."""

    def admit(self, site: str) -> None:
        """A site that takes no step may ask for evaluations."""

    def leave(self, site: str) -> None:
        """The round goes on without a site."""

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """All of it between two steps."""

    def load_state_dict(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""


class Group:
    """See the module text.  Not thread-safe: the service holds its lock.

    Args:
        sites: by name.
        engine: trains their half; the round has begun there, and no step was taken.
        store: of snapshots, of this round and these sites.
        every: steps between two snapshots; 0 = none.
        patience: seconds that a site is waited for.

    Attributes:
        epoch: meetings so far; what a site was told in an earlier one is void.
        live: sites at work.
        done: sites that have ended the round.
        left: sites without which it goes on.
    """

    def __init__(
        self, sites: Sequence[str], engine: Engine, store: HalfStore, every: int, patience: float
    ) -> None:
        self.sites = sorted(sites)
        self.engine, self.store = engine, store
        self.every, self.patience = every, patience
        self.epoch = 0
        self.live: set[str] = set()
        self.done: set[str] = set()
        self.left: set[str] = set()
        self.step = 0
        self._away: dict[str, float] = {}
        self._saved = 0
        self._ending: dict[str, Reply] = {}
        self._ended = -1
        self._begin = engine.state_dict()
        self.meeting = self._new_meeting()
        self._restore()

    # -- sites come and go ----------------------------------------------------------

    def arrive(self, site: str, steps: Sequence[int], now: float) -> set[str]:
        """A site joins; returns those who have to join anew, since it cannot go on with them.

        Raises:
            HandshakeRefused: the round goes on, or ended, without it.
        """
        if site in self.left:
            raise HandshakeRefused(
                f"the round goes on without site {site}, which was away for more than "
                f"{self.patience:g} s; it takes part in the next one", fault="site",
            )  # fmt: skip
        others = self.live - {site}
        self._away.pop(site, None)
        if not self.meeting.steps:
            self.meeting = self._new_meeting()
        self.meeting.arrive(site, steps, now)
        self.live.clear()
        self._ending.clear()
        return others

    def gone(self, site: str, now: float) -> None:
        """A site's session ended."""
        self.meeting.leave(site)
        if site in self.live:
            self.live.discard(site)
            self._away[site] = now

    def meet(self, now: float) -> bool:
        """Begin where all can, once all are here; whether they did."""
        if not self.meeting.ready(now):
            return False
        for site in sorted(self.meeting.missing() - self.left - self.done):
            self._leave(site)
        step = self.meeting.step(self.store.steps())
        while step and self._load(step) is None:
            self.store.back_to(step - 1)
            step = self.meeting.step(self.store.steps())
        if not step:
            self.engine.load_state_dict(*self._begin)
        self.store.back_to(step)
        self.step = self._saved = step
        self.epoch += 1
        self.live = set(self.meeting.steps)
        self.done -= self.live
        for site in self.sites:
            # Who ended the round is not awaited, unless all go back before its end.
            if site in self.left or (site not in self.live and step != self._ended):
                self.engine.leave(site)
        self.meeting = self._new_meeting()
        logger.info("epoch %d: %s after step %d", self.epoch, ", ".join(sorted(self.live)), step)
        return True

    def look(self, now: float) -> None:
        """Go on without sites that have been away for too long."""
        for site, since in list(self._away.items()):
            if now - since >= self.patience and site not in self.done:
                self._leave(site)

    # -- work -------------------------------------------------------------------------

    def serve(self, site: str, call: Call, answer: Reply) -> None:
        """Take a call of a live site."""
        if site not in self.live:
            answer(SessionLost("the round goes on from another step; join anew"))
        elif call.kind == "finish":
            self.engine.submit(site, call, lambda found: self._finished(site, found, answer))
        else:
            self.engine.submit(site, call, answer)

    def _finished(self, site: str, found: Answer | SplitError, answer: Reply) -> None:
        """The engine knows that a site has taken its last step; the site waits for the others."""
        if isinstance(found, Answer) and site in self.live:
            self._ending[site] = answer
        else:
            answer(found)

    def work(self) -> bool:
        """Run one call; whether there was one."""
        worked = self.engine.work(0.0)
        if worked:
            self._snapshot()
        return worked

    @property
    def over(self) -> bool:
        """Whether all that were not left out have ended the round."""
        return self.done | self.left >= set(self.sites)

    def close(self, error: SplitError) -> None:
        """Answer whoever waits."""
        for answer in self._ending.values():
            answer(error)
        self._ending.clear()

    def end(self) -> None:
        """Let all who wait to end do so at once: who has ended could not go back any more."""
        waiting = set(self._ending)
        if not waiting or waiting != self.live or self.meeting.steps or self._away:
            return
        self.done |= waiting
        self._ended = self.engine.boundary or 0
        saved = self.store.save(self._ended, *self._stated())
        if not saved:
            logger.error("the end of the round is not on disk")
        answers, self._ending = self._ending, {}
        for answer in answers.values():
            answer(Answer({"saved": saved}))

    def _leave(self, site: str) -> None:
        logger.warning("the round goes on without site %s", site)
        self.left.add(site)
        self._away.pop(site, None)
        self.live.discard(site)
        self.engine.leave(site)

    # -- state ------------------------------------------------------------------------

    def _new_meeting(self) -> Meeting:
        return Meeting(set(self.sites) - self.left - self.done, self.patience)

    def _snapshot(self) -> None:
        step = self.engine.boundary
        if step is None:  # between the sites' turns
            return
        if self.every and step > self._saved and step % self.every == 0:
            self._saved = step
            self.store.save(step, *self._stated())

    def _stated(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, state = self.engine.state_dict()
        return tensors, {
            "engine": dict(state), "done": sorted(self.done), "left": sorted(self.left),
            "ended": self._ended,
        }  # fmt: skip

    def _load(self, step: int) -> Mapping[str, Any] | None:
        """Take over what the store has of a step: what stands beside the engine's state."""
        found = self.store.load(step)
        if found is None:
            return None
        tensors, state = found
        self.engine.load_state_dict(tensors, state["engine"])
        return state

    def _restore(self) -> None:
        """Of a round that another process began: its newest state, for sites that have ended."""
        for step in self.store.steps():
            state = self._load(step)
            if state is not None:
                self.done = set(state["done"]) & set(self.sites)
                self.left = set(state["left"]) & set(self.sites)
                self._ended = int(state["ended"])
                self.step = self._saved = step
                self.meeting = self._new_meeting()
                return
