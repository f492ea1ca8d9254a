"""What the stream's server is given to serve: sites in groups, evaluation, one compute thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from flower_geo.calls import Call
from flower_geo.cloud.group import Engine, Group, Reply
from flower_geo.errors import CallFailed, HandshakeRefused, SessionLost, SplitError
from flower_geo.transport import Hello, Joined

__all__ = ["Service"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at who is away.
_LOOK = 0.2


class Service:
    """The transport's handler.

    Args:
        drop: ends sites' sessions, so that they join anew.
        failed: called when the compute thread cannot go on; nobody would be answered.
    """

    def __init__(
        self, drop: Callable[..., None], failed: Callable[[Exception], None] = lambda error: None
    ) -> None:
        self._drop = drop
        self._failed = failed
        self._changed = threading.Condition(threading.RLock())
        self._round = 0
        self._groups: list[Group] = []
        self._visitors: set[str] = set()
        self._evaluated: Engine | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="flower-geo-half", daemon=True)
        self._thread.start()

    # -- the round ------------------------------------------------------------------

    def begin(self, round: int, groups: list[Group], evaluated: Engine) -> None:
        """Serve these groups from now on; ``evaluated`` answers evaluations."""
        with self._changed:
            self._over(SessionLost("another round begins"))
            self._round, self._groups, self._evaluated = round, groups, evaluated
            self._changed.notify_all()

    def settled(self) -> list[Group]:
        """The round's groups; nobody trains in them any longer."""
        with self._changed:
            groups = self._groups
            self._over(HandshakeRefused("the round has ended", fault="cloud"))
            return groups

    def rest(self, engine: Engine) -> None:
        """Between rounds: only evaluations, by this engine."""
        with self._changed:
            self._evaluated = engine

    def stop(self) -> None:
        """End the compute thread."""
        with self._changed:
            self._stopped = True
            self._over(SessionLost("the cloud's half ends"))
            self._changed.notify_all()
        self._thread.join()

    def _over(self, error: SplitError) -> None:
        for group in self._groups:
            group.close(error)
        self._groups = []
        self._changed.notify_all()

    # -- the transport's handler ------------------------------------------------------

    def join(self, hello: Hello) -> Joined:
        """Let a site in where it and the others can go on.

        A site in try 0 comes to evaluate only.

        Raises:
            HandshakeRefused: not this round, or not this site.
            SessionLost: the others did not come in time.
        """
        with self._changed:
            if not hello.attempt:
                self._visitors.add(hello.site)
                if self._evaluated is not None:
                    self._evaluated.admit(hello.site)
                return Joined(0, 0)
            self._visitors.discard(hello.site)
            group = self._group(hello)
            others = group.arrive(hello.site, hello.steps, time.monotonic())
            epoch, until = group.epoch, time.monotonic() + hello.deadline
            self._changed.notify_all()
        if others:
            logger.info("site %s comes back: the others go back with it", hello.site)
            # Not under the lock: it calls ``gone``.
            self._drop(*sorted(others))
        with self._changed:
            while group.epoch == epoch:
                left = until - time.monotonic()
                if left <= 0 or group not in self._groups:
                    group.gone(hello.site, time.monotonic())
                    raise SessionLost("the other sites of the round did not come; join anew")
                self._changed.wait(min(left, 1.0))
            if hello.site not in group.live:
                raise SessionLost("another site came back meanwhile; join anew")
            return Joined(group.epoch, group.step)

    def serve(self, site: str, call: Call, answer: Reply) -> None:
        """Take a call."""
        with self._changed:
            group = next((each for each in self._groups if site in each.sites), None)
            if site in self._visitors or call.kind == "evaluate":
                self._evaluate(group, site, call, answer)
            elif group is None:
                answer(SessionLost("the round has ended"))
            else:
                group.serve(site, call, answer)
            self._changed.notify_all()

    def gone(self, site: str) -> None:
        """A session ended."""
        with self._changed:
            self._visitors.discard(site)
            for group in self._groups:
                if site in group.sites:
                    group.gone(site, time.monotonic())
            self._changed.notify_all()

    def _evaluate(self, group: Group | None, site: str, call: Call, answer: Reply) -> None:
        mine = group is not None and site in group.live
        engine = group.engine if group is not None and mine else self._evaluated
        if call.kind != "evaluate" or engine is None:
            answer(CallFailed(f"a site that evaluates cannot call {call.kind!r}", fault="site"))
            return
        engine.submit(site, call, answer)

    def _group(self, hello: Hello) -> Group:
        for group in self._groups:
            if hello.site in group.sites and hello.round == self._round:
                return group
        raise HandshakeRefused(
            f"site {hello.site} is not asked for round {hello.round} (the cloud is in round "
            f"{self._round})", fault="site", retry=True,
        )  # fmt: skip

    # -- the compute thread -----------------------------------------------------------

    def _run(self) -> None:
        try:
            looked = 0.0
            while not self._stopped:
                now = time.monotonic()
                if now - looked >= _LOOK:
                    looked = now
                    with self._changed:
                        self._look(now)
                if not self._work():
                    with self._changed:
                        if not self._stopped:
                            self._changed.wait(0.02)
        except Exception as error:
            logger.exception("the cloud's half fails")
            self._failed(error)

    def _look(self, now: float) -> None:
        for group in self._groups:
            group.look(now)
            if group.meet(now):
                self._changed.notify_all()

    def _work(self) -> bool:
        """A call of each engine in turn."""
        with self._changed:
            engines: Mapping[int, Engine] = {id(each.engine): each.engine for each in self._groups}
            idle = self._evaluated
            groups = list(self._groups)
            for group in groups:
                group.end()
        worked = False
        for group in groups:
            # The engine's own lock lets calls come in meanwhile.
            if group.work():
                worked = True
        if idle is not None and id(idle) not in engines:
            worked |= idle.work(0.0)
        return worked
