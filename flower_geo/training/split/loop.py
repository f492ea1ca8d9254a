"""The site's half of split training, with the face of the inner loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_geo.calls import Answer
from flower_geo.errors import CallFailed, ConfigError, NonFiniteTensor
from flower_geo.evaluation.batch import Batch
from flower_geo.evaluation.instructions import Examples, InstructionResult, held_out_batches
from flower_geo.evaluation.precision import autocast
from flower_geo.evaluation.text import evaluating
from flower_geo.models.split import Role, SplitPart
from flower_geo.training.loop import InnerLoop, not_finite
from flower_geo.training.optimizer import flat_state
from flower_geo.training.rounds import Round
from flower_geo.training.schedule import InnerConfig, learning_rate
from flower_geo.training.split.exchange import Exchange, NotFinite, OwnHead, TopHere, TopThere
from flower_geo.training.split.head import logits_of
from flower_geo.training.split.lane import Traffic
from flower_geo.training.split.modes import Auxiliary, Mode, check_mode, check_part, sends_labels
from flower_geo.training.split.norms import norms_of, total_norm
from flower_geo.training.split.probe import Probe
from flower_geo.training.split.site import Channel, Link, Micro, SiteHalf, micro_of
from flower_geo.training.split.state import under
from flower_geo.training.split.streams import Stream
from flower_geo.training.split.wire import Wire, WireEnd
from flower_geo.training.tally import InnerResult, RoundSoFar

__all__ = ["SplitLoop"]

_LEAD = "split/"


class SplitLoop(InnerLoop):
    """Trains a site's parts of a cut model, the cloud's half being called for the rest.

    ``run``, ``so_far``, ``state_dict`` and ``load_state_dict`` are those of
    :class:`InnerLoop`.  A batch may hold ``sample_ids`` ``LongTensor[b]``: a number
    for each row that names its sample in every epoch alike (its index in the site's
    data), which delta coding needs; rows without one are sent whole.

    The micro-batches of a step are the ``grad_accum`` batches of ``config``, those
    without a label that counts left out.

    Each part has a random stream of its own.  The bottom's starts from torch's
    global state when the loop is built, the others' follow from it; the caller's
    stays as it was.

    An error of a call, or a step that is not finite, leaves weights, optimizer and
    references as they were before that step.

    Args:
        parts: bottom, and top for a U-shape, of one ``split_parts``.
        channel: to the cloud's half.
        config: of the inner loop, the same as the cloud's.
        wire: settings, the same as the cloud's.
        mode: how the halves train each other.
        in_flight: micro-batches on the wire at most.
        auxiliary: the site's own head, for ``cse`` and ``sage``.

    Raises:
        ConfigError: mode, cut and config do not go together.
        TrainingError: the parts have no parameter to train.
    """

    def __init__(
        self,
        parts: Mapping[Role, SplitPart],
        channel: Channel,
        config: InnerConfig,
        wire: Wire,
        mode: Mode,
        *,
        in_flight: int = 4,
        auxiliary: Auxiliary | None = None,
    ) -> None:
        half = SiteHalf(parts)
        check_mode(mode, half.bottom.cut)
        for part in half.parts.values():
            check_part(part)
        if config.prox_mu:
            raise ConfigError("prox-mu has no meaning for a half of a model; leave it at 0")
        if in_flight < 1:
            raise ConfigError(f"in-flight={in_flight} is out of range; use 1 or more")
        super().__init__(half, config)
        # Every step asks for numbers from the cloud, so nothing is put off.
        self._deferred = False
        self.half = half
        self.mode: Mode = mode
        self._in_flight = in_flight
        bottom = Stream(self._device)
        self._streams: dict[Role, Stream] = {"bottom": bottom}
        seed = bottom.number()
        if half.top is not None:
            self._streams["top"] = Stream(self._device, seed ^ 1)
        self._wire = WireEnd(wire, seed ^ 2)
        self._link = Link(
            half.parts, channel, self._wire, self._streams, config.precision,
            labels=sends_labels(mode),
        )  # fmt: skip
        self._probe: Probe | None = None
        self._exchange = self._exchange_for(auxiliary or Auxiliary(), seed)
        self._place = 0.0

    def _exchange_for(self, auxiliary: Auxiliary, seed: int) -> Exchange:
        if self.mode == "u-shape":
            return TopHere(self._link, self._in_flight)
        if self.mode not in ("cse", "sage"):
            return TopThere(self._link, self._in_flight)
        config = self.config
        self._probe = Probe(self.half.bottom, auxiliary, seed ^ 3, config.betas, config.eps)
        aligned = self.mode == "sage"
        return OwnHead(self._link, self._in_flight, self._probe, auxiliary, aligned=aligned)

    @property
    def traffic(self) -> Traffic:
        """Calls made by this loop and the bytes of their blobs."""
        return self._link.traffic

    @property
    def alignment_error(self) -> float | None:
        """``sage``: the share of the cloud's gradient that the newest alignment found missed."""
        return self._exchange.alignment_error if isinstance(self._exchange, OwnHead) else None

    def run(
        self,
        next_batch: Callable[[], Batch],
        steps: int | None,
        seconds: float | None = None,
        position: float = 0,
        span: float | None = None,
        on_step: Callable[[int, Tensor], None] | None = None,
        *,
        start: int = 0,
        carried: RoundSoFar | None = None,
    ) -> InnerResult:
        """See :meth:`InnerLoop.run`; at the end the cloud is told that this site has finished.

        Raises:
            TrainingError: as there.
            SplitError: a call failed; the site is at the begin of that step.
        """
        self._link.unproven = True
        result = super().run(
            next_batch, steps, seconds, position, span, on_step, start=start, carried=carried
        )
        self._link.took(self._link.call("finish", 0, 0, {"steps": result.steps}))
        return result

    @torch.no_grad()
    def evaluate(
        self,
        examples: Examples,
        collate: Callable[[list[Any]], Mapping[str, Tensor]],
        batch_size: int,
        max_tokens: int | None = None,
    ) -> InstructionResult:
        """Loss and token accuracy of both halves on held-out examples.

        As ``evaluate_instructions`` gives them for the whole model: hidden states go
        without loss and without noise.  Nothing changes on either side.

        Raises:
            DataError: there is no example, or none with a label that counts.
            SplitError: a call failed.
        """
        total = torch.zeros((), dtype=torch.float64)
        tokens = correct = 0
        waiting: deque[tuple[Micro, Future[Answer]]] = deque()

        def finish() -> None:
            nonlocal total, tokens, correct
            micro, future = waiting.popleft()
            loss, hits = self._held_out(micro, self._link.took(future))
            total += loss
            correct += hits
            tokens += len(micro)

        with evaluating(self.model):
            for batch in held_out_batches(examples, collate, batch_size, max_tokens):
                micro = micro_of(batch, self._device)
                assert micro is not None  # examples without labels were left out
                if len(waiting) >= self._in_flight:
                    finish()
                waiting.append((micro, self._link.held_out(micro)))
            while waiting:
                finish()
        return InstructionResult(float(total), tokens, correct)

    def _held_out(self, micro: Micro, answer: Answer) -> tuple[Tensor, int]:
        """Sum of losses (fp64) and hits of a held-out batch."""
        if sends_labels(self.mode):
            try:
                loss, hits = float(answer.meta["loss"]), int(answer.meta["correct"])
            except (KeyError, TypeError, ValueError):
                raise CallFailed("the cloud's answer tells no held-out loss") from None
            return torch.tensor(loss, dtype=torch.float64), hits
        top = self.half.top
        assert top is not None
        shape = (*micro.inputs["input_ids"].shape, int(self._width()))
        hidden = self._exact(answer, shape)
        with autocast(self.config.precision, self._device):
            logits, targets = logits_of(top, hidden, micro.inputs, micro.places)
        losses = functional.cross_entropy(logits, targets, reduction="none")
        hits = int((logits.argmax(dim=-1) == targets).sum())
        return losses.sum(dtype=torch.float64).cpu(), hits

    def state_dict(self) -> dict[str, Tensor]:
        """Optimizer, random streams, references and auxiliary head as CPU tensors.

        Keys: as :meth:`InnerLoop.state_dict` (``rng/...`` is the bottom's stream), and
        ``split/...``.  Weights of the parts are not part of it.
        """
        state = flat_state(self._optimizer, self._parameters)
        state |= {f"rng/{k}": v for k, v in self._streams["bottom"].state().items()}
        if "top" in self._streams:
            state |= {f"{_LEAD}rng/{k}": v for k, v in self._streams["top"].state().items()}
        state |= {f"{_LEAD}wire/{k}": v for k, v in self._wire.state().items()}
        if self._probe is not None:
            state |= {f"{_LEAD}probe/{k}": v for k, v in self._probe.state().items()}
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`InnerLoop.load_state_dict`."""
        own = under(state, _LEAD)
        super().load_state_dict({k: v for k, v in state.items() if not k.startswith(_LEAD)})
        self._streams["bottom"].load(under(state, "rng/"))
        if "top" in self._streams:
            self._streams["top"].load(under(own, "rng/"))
        self._wire.load(under(own, "wire/"))
        probe = under(own, "probe/")
        if self._probe is not None and probe:
            self._probe.load(probe)

    def _set_rate(self, this: Round) -> None:
        self._place = this.place()
        rate = learning_rate(self.config, self._place)
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _step(self, this: Round) -> Tensor:
        micros, total = self._micros(this.next_batch)
        try:
            loss, norm = self._both(this.step + 1, micros, total)
            if loss is not None:
                this.tally.add(loss, norm, total, this.step)
                self._look(this.tally)
        except BaseException as error:
            self._undo()
            if isinstance(error, NonFiniteTensor):
                raise not_finite(this.step, float("nan")) from error
            if isinstance(error, NotFinite):
                raise not_finite(this.step, error.loss) from None
            raise
        self._wire.commit()
        if loss is None:
            this.tally.skip()
            return torch.zeros((), device=self._device)
        if self.config.clip_norm:
            nn.utils.clip_grads_with_norm_(self._parameters.values(), self.config.clip_norm, norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._probe is not None:
            self._step_probe()
        return loss

    def _both(self, step: int, micros: list[Micro], total: int) -> tuple[Tensor | None, Tensor]:
        """Gradient and step of both halves: the loss, and the norm to clip by."""
        loss = self._exchange.run(step, micros, total) if total else None
        norms = {role: norms_of(gradients) for role, gradients in self._gradients().items()}
        own = total_norm([norm for found in norms.values() for norm in found], self._device)
        if not bool(torch.isfinite(own)):
            raise NotFinite(float("nan") if loss is None else float(loss))
        local = self._probe is not None
        meta = {
            "tokens": total, "micros": len(micros), "position": self._place,
            "norms": {} if local else norms,
        }  # fmt: skip
        answer = self._link.took(self._link.call("step", step, 0, meta))
        try:
            norm = float(answer.meta["norm"])
        except (KeyError, TypeError, ValueError):
            raise CallFailed("the cloud's answer to a step tells no norm") from None
        if answer.meta.get("finite") is False:
            raise NotFinite(float("nan") if loss is None else float(loss))
        whole = torch.tensor(norm, dtype=torch.float32, device=self._device)
        return loss, own if local else whole

    def _micros(self, next_batch: Callable[[], Batch]) -> tuple[list[Micro], int]:
        """The micro-batches of a step that have something to predict, and how much."""
        batches = [next_batch() for _ in range(self.config.grad_accum)]
        found = [micro_of(batch, self._device) for batch in batches]
        micros = [micro for micro in found if micro is not None]
        return micros, sum(map(len, micros))

    def _gradients(self) -> dict[str, list[Tensor | None]]:
        """Gradients by part, in the order of the whole model's parameters."""
        found: dict[str, list[Tensor | None]] = {}
        seen: set[int] = set()
        for role, part in self.half.parts.items():
            own = [p for p in part.parameters() if id(p) not in seen]
            seen |= {id(p) for p in own}
            found[role] = [p.grad for p in own]
        return found

    def _step_probe(self) -> None:
        assert self._probe is not None
        if self.mode == "cse":
            self._probe.step(learning_rate(self.config, self._place))
        self._probe.forget_gradients()

    def _undo(self) -> None:
        self._wire.rollback()
        self._optimizer.zero_grad(set_to_none=True)
        if self._probe is not None:
            self._probe.forget_gradients()

    def _width(self) -> int:
        model: Any = self.half.bottom.model
        return int(model.config.hidden_size)

    def _exact(self, answer: Answer, shape: tuple[int, ...]) -> Tensor:
        """Hidden states of an answer about held-out examples."""
        found = WireEnd(Wire(codec_activations="fp32")).receive(
            "upper", answer.meta, answer.blobs, None, shape[2], shape[0] * shape[1]
        )
        if found.shape != shape:
            raise CallFailed(
                f"the cloud answered hidden states {list(found.shape)}, not {list(shape)}"
            )
        return found.to(self._device)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Training mode; random streams are put in place by the parts that need them."""
        mode = self.model.training
        self._running = True
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            self._running = False
            self.model.train(mode)
