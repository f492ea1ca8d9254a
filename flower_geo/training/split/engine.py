"""The cloud's half of split training: what all sites of a round call."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flower_geo.calls import Answer, Call
from flower_geo.errors import CallFailed, FlowerGeoError, SplitError, TrainingError
from flower_geo.evaluation.precision import device_of
from flower_geo.models import adapter_state, snapshot
from flower_geo.models.split import SplitPart
from flower_geo.training.schedule import InnerConfig, learning_rate
from flower_geo.training.split.compute import Compute
from flower_geo.training.split.half import Half, mean_of
from flower_geo.training.split.lane import Lane, Reply, Traffic, norms_in, problem_of
from flower_geo.training.split.modes import Mode, check_mode, check_part, meets
from flower_geo.training.split.norms import finite, norms_of, norms_over, total_norm
from flower_geo.training.split.state import Place, engine_state, load_engine_state
from flower_geo.training.split.streams import Stream
from flower_geo.training.split.values import number_json, refused
from flower_geo.training.split.wire import Wire, WireEnd, seed_of

__all__ = ["CloudEngine"]

#: Calls of a site that may wait here.
_MAX_QUEUE = 256


class CloudEngine:
    """Trains the cloud's half of a model with the sites of a round.

    ``submit`` and ``leave`` may be called from any thread; everything else
    belongs to the one thread that calls ``work``.

    With ``vanilla``, ``u-shape``, ``cse`` and ``sage`` all sites share the half and
    a step is taken when every site has called for it: along the mean of the sites'
    gradients, weighted by their tokens, in sorted order.  With ``sfl-v2`` they share
    it and take their steps in turn.  With ``sfl-v1`` each has weights and optimizer
    of its own on the one frozen base until ``average``.

    Clipping is by the norm over both halves.  Where several sites share a step, the
    share of their halves is the root of the token-weighted mean of their squared
    norms, no less than the norm of their mean; site and cloud scale by one factor.

    A call that fails undoes the step under way of its site, which may begin it anew.

    Args:
        part: the middle, with what is to be trained requiring a gradient.
        config: of the inner loop, the same as at the sites.
        wire: settings, the same as at the sites.
        mode: how the halves train each other.
        seed: of dropout.
        in_flight: micro-batches of a site that may wait for their backward (u-shape).
        max_tokens: positions [b * n] of a call at most.
        meet_every: under ``sfl-v1``, sites wait for each other every so many steps,
            so that there is a step all are at; 0 = never.

    Raises:
        ConfigError: mode, cut and config do not go together.
        TrainingError: nothing is trained.
    """

    def __init__(
        self,
        part: SplitPart,
        config: InnerConfig,
        wire: Wire,
        mode: Mode,
        *,
        seed: int = 0,
        in_flight: int = 16,
        max_tokens: int = 2**17,
        meet_every: int = 0,
    ) -> None:
        check_mode(mode, part.cut)
        check_part(part)
        self.part = part
        self.config = config
        self.wire = wire
        self.mode: Mode = mode
        self._seed = seed
        self._meet_every = meet_every if mode == "sfl-v1" else 0
        self._device = device_of(part)
        self._compute = Compute(part, config, mode, max_tokens, in_flight)
        self._half = Half(part, config)
        self._lanes: dict[str, Lane] = {}
        self._place = Place()
        self._first: dict[str, Tensor] = {}
        self._news = threading.Condition()
        self._last = ""

    # -- the round ------------------------------------------------------------

    def begin(
        self, round: int, sites: Sequence[str], position: float, span: float, steps: int | None
    ) -> None:
        """Begin a round with the weights the part has now.

        Optimizers and references of sites that were there before are kept.  Calls
        that were not answered fail.

        Args:
            round: its number, from 1.
            sites: all that are to take part; a step waits for each until it leaves.
            position: schedule position of the round's start.
            span: schedule steps it stands for.
            steps: of each site; None = until a site says it has finished.
        """
        known = self._lanes
        self._drop_calls(list(known.values()), "a new round has begun")
        self._place = Place(round, position, span, steps)
        self._half.begin()
        lanes = {site: self._lane(site, known.get(site)) for site in sorted(set(sites))}
        for site, lane in lanes.items():
            lane.stream = Stream(self._device, seed_of(self._seed, "cloud", round, site))
        self._keep_first()
        with self._news:
            self._lanes, self._last = lanes, ""
            self._news.notify_all()

    def _lane(self, site: str, known: Lane | None) -> Lane:
        half = self._half
        if self.mode == "sfl-v1":
            half = known.half if known is not None else Half(self.part, self.config, own=True)
            half.begin()
        wire = known.wire if known is not None else WireEnd(self.wire)
        wire.rollback()
        return Lane(site, half, Stream(self._device, 0), wire)

    def _keep_first(self) -> None:
        """The weights of the round's begin, where a site may move on before others looked."""
        shared = self.mode == "sfl-v2"
        self._first = {n: t.clone() for n, t in self._half.weights().items()} if shared else {}

    def admit(self, site: str) -> None:
        """Let a site that takes no step of this round ask for evaluations."""
        lane = self._lane(site, None)
        lane.finished = True
        with self._news:
            if site not in self._lanes or self._lanes[site].gone:
                self._lanes = dict(sorted({**self._lanes, site: lane}.items()))

    def leave(self, site: str) -> None:
        """Go on without a site for the rest of the round; its calls fail."""
        with self._news:
            lane = self._lanes.get(site)
            if lane is None:
                return
            lane.gone = True
            self._news.notify_all()
        self._drop_calls([lane], f"site {site} has left the round")

    def average(self) -> dict[str, Tensor]:
        """End a round of ``sfl-v1``: the part takes the token-weighted mean of its sites' halves.

        Sites that left, or took no step, do not count; nothing changes where none does.
        Gives what ``adapter`` does.
        """
        lanes = [lane for lane in self._lanes.values() if not lane.gone and lane.trained]
        if self.mode == "sfl-v1" and lanes:
            names = list(self._half.parameters)
            halves = [(lane.trained, lane.half.weights()) for lane in lanes]
            doubled = [(n, {k: t.double() for k, t in half.items()}) for n, half in halves]
            mean = mean_of(doubled, names)
            own = self._half.weights()
            self._half.load_weights({name: mean[name].to(own[name].dtype) for name in own})
        return self.adapter()

    def adapter(self) -> dict[str, Tensor]:
        """fp32 CPU copies of what the cloud trains: the adapter's, else the parameters'."""
        model: Any = self.part.model
        return adapter_state(model) if hasattr(model, "peft_config") else snapshot(self.part)

    @property
    def sites(self) -> tuple[str, ...]:
        """Sites of the round, sorted; those that left are not among them."""
        return tuple(site for site, lane in self._lanes.items() if not lane.gone)

    @property
    def steps_done(self) -> dict[str, int]:
        """Steps taken by each site that has not left."""
        return {site: lane.step for site, lane in self._lanes.items() if not lane.gone}

    @property
    def boundary(self) -> int | None:
        """The step that all sites are at, none in the midst of the next; None where they differ.

        Sites that finished before do not count.  The moment to take a snapshot is
        right after ``work``, before it is called again.
        """
        lanes = [lane for lane in self._lanes.values() if not lane.gone]
        active = [lane for lane in lanes if lane.active] or lanes
        steps = {lane.step for lane in active}
        whole = len(steps) == 1 and all(lane.between_steps for lane in active)
        return steps.pop() if whole else None

    def traffic(self, site: str) -> Traffic:
        """Calls of a site in this round and the bytes of their blobs."""
        return self._lanes[site].traffic

    # -- state ----------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The round at a step's boundary: tensors (CPU) and a JSON object.

        Raises:
            TrainingError: a site is in the midst of a step.
        """
        if any(lane.active and not lane.between_steps for lane in self._lanes.values()):
            raise TrainingError(
                "a site is in the midst of a step; take the state when boundary is a number"
            )
        return engine_state(self.mode, self._place, self._half, self._lanes)

    def load_state_dict(self, tensors: Mapping[str, Tensor], meta: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken; with the same calls, bit-equal.

        Calls that were not answered fail.

        Raises:
            TrainingError: the state is of another mode, model or optimizer.
        """
        self._drop_calls(list(self._lanes.values()), "the round has gone back to a snapshot")
        place, lanes = load_engine_state(
            tensors, meta, self.mode, self._half, lambda site: self._lane(site, None)
        )
        self._place = place
        self._keep_first()
        with self._news:
            self._lanes, self._last = lanes, ""
            self._news.notify_all()

    # -- calls ----------------------------------------------------------------

    def submit(self, site: str, call: Call, answer: Reply) -> None:
        """Take a call; ``answer`` gets the answer or a ``SplitError``, from some thread."""
        with self._news:
            lane = self._lanes.get(site)
            fault = ""
            if lane is None or lane.gone:
                fault = f"site {site} is not, or no longer, in this round"
            elif len(lane.queue) >= _MAX_QUEUE:
                fault = f"{_MAX_QUEUE} calls of site {site} wait already"
            else:
                lane.traffic.sent(call)
                lane.queue.append((call, answer))
                self._news.notify_all()
        if fault:
            answer(refused(fault))

    def work(self, timeout: float) -> bool:
        """Run the next call that may run, site after site.

        Args:
            timeout: seconds to wait for one.

        Returns:
            Whether there was one.
        """
        with self._news:
            chosen = self._next()
            if chosen is None:
                self._news.wait(timeout)
                chosen = self._next()
            if chosen is None:
                return False
            self._last = chosen[0].site
            taken = [(lane, *lane.queue.popleft()) for lane in chosen]
        if taken[0][1].kind == "step":
            self._steps(taken)
            return True
        lane, call, reply = taken[0]
        self._reply(lane, reply, self._one(lane, call))
        return True

    def _next(self) -> list[Lane] | None:
        """Lanes whose first calls are to run now: one, or all that take a step together."""
        order = list(self._lanes.values())
        start = sum(lane.site <= self._last for lane in order)
        for lane in order[start:] + order[:start]:
            if lane.gone and lane.micro:
                lane.undo()  # what it holds in memory
            if lane.gone or not lane.queue:
                continue
            call = lane.queue[0][0]
            if self._problem(lane, call) is not None:
                return [lane]
            if call.kind == "step" and meets(self.mode):
                together = [other for other in order if other.active]
                if all(self._at_step(other) for other in together):
                    return together
            elif self._may_run(lane, call):
                return [lane]
        return None

    def _problem(self, lane: Lane, call: Call) -> CallFailed | None:
        return problem_of(lane, call, self.mode, self._place.steps)

    def _at_step(self, lane: Lane) -> bool:
        """Whether a lane waits for its step to be taken."""
        call = lane.queue[0][0] if lane.queue else None
        return call is not None and call.kind == "step" and self._problem(lane, call) is None

    def _may_run(self, lane: Lane, call: Call) -> bool:
        active = [other for other in self._lanes.values() if other.active]
        if call.kind == "finish":
            return True
        if call.kind == "evaluate":
            # After its last step a site looks at the half that all of them have made.
            return self.mode == "sfl-v1" or lane.active or not active
        if self.mode == "sfl-v2":
            return lane is min(active, key=lambda other: (other.step, other.site))
        if self._meet_every and lane.step % self._meet_every == 0:
            return all(other.step >= lane.step for other in active)
        return True

    def _one(self, lane: Lane, call: Call) -> Answer | SplitError:
        """Run a call that is no step."""
        problem = self._problem(lane, call)
        if problem is not None:
            return problem
        try:
            if call.kind == "forward":
                return self._compute.forward(lane, call)
            if call.kind == "backward":
                return self._compute.backward(lane, call)
            if call.kind == "evaluate":
                early = self._first if lane.step == 0 and self._first else None
                return self._compute.evaluate(lane, call, early)
            lane.finished = True
            return Answer({"steps": lane.step})
        except SplitError as error:
            failed: SplitError = error
        except FlowerGeoError as error:
            failed = CallFailed(f"a call of site {lane.site} failed: {error}", fault="site")
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            first = (str(error).splitlines() or [type(error).__name__])[0]
            failed = CallFailed(f"a call of site {lane.site} failed in the cloud: {first}")
        if call.kind != "evaluate":
            lane.undo()
        return failed

    def _steps(self, taken: Sequence[tuple[Lane, Call, Reply]]) -> None:
        """Take one step for all these lanes, in their order."""
        lane, call, reply = taken[0]
        problem = self._problem(lane, call) if len(taken) == 1 else None
        if problem is not None:
            self._reply(lane, reply, problem)
            return
        broken = [each for each in taken if not finite(each[0].gradients.values())]
        if broken and len(broken) < len(taken):
            # One site's gradient must not stop the others.
            for lane, _, reply in broken:
                lane.undo()
                self._reply(lane, reply, Answer({"finite": False, "norm": "nan"}))
                self.leave(lane.site)
            taken = [each for each in taken if each not in broken]
        answer = self._step([(lane, call) for lane, call, _ in taken])
        for lane, _, reply in taken:
            if answer.meta["finite"]:
                lane.stepped()
                lane.finished = lane.finished or lane.step == self._place.steps
            else:
                lane.undo()
            self._reply(lane, reply, answer)

    def _step(self, taken: Sequence[tuple[Lane, Call]]) -> Answer:
        half = taken[0][0].half
        total = sum(lane.tokens for lane, _ in taken)
        if not total:
            return Answer({"finite": True, "norm": 0.0, "tokens": 0})
        parts = [(lane.tokens, lane.gradients) for lane, _ in taken]
        gradients = mean_of(parts, list(half.parameters))
        own = norms_of(half.ordered(gradients))
        sites = [(lane.tokens, *norms_in(call.meta)) for lane, call in taken if lane.tokens]
        norm = total_norm(norms_over(sites, own), self._device)
        if not bool(torch.isfinite(norm)):
            return Answer({"finite": False, "norm": number_json(float(norm))})
        position = max(float(call.meta["position"]) for _, call in taken)
        half.step(gradients, norm, learning_rate(self.config, self._place.within(position)))
        return Answer({"finite": True, "norm": float(norm), "tokens": total})

    def _reply(self, lane: Lane, reply: Reply, answer: Answer | SplitError) -> None:
        if isinstance(answer, Answer):
            lane.traffic.answered(answer)
        reply(answer)

    def _drop_calls(self, lanes: Sequence[Lane], why: str) -> None:
        with self._news:
            waiting = [reply for lane in lanes for _, reply in lane.queue]
            for lane in lanes:
                lane.queue.clear()
        for reply in waiting:
            reply(CallFailed(f"a call was not answered: {why}", retry=True))
