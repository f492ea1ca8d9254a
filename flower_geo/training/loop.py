"""The inner loop: local training steps of one site.

One loop lives over a site's rounds: the model's weights change at a round's
start, the optimizer's moments stay.  The learning rate is a function of the
position in the whole run's schedule, never of the round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from flower_geo.errors import TrainingError
from flower_geo.evaluation.batch import Batch, counted, counted_logits
from flower_geo.evaluation.precision import autocast, device_of
from flower_geo.training.optimizer import adopted, flat_state, load_flat_state
from flower_geo.training.proximal import START, RoundStart
from flower_geo.training.rounds import Round, is_over
from flower_geo.training.schedule import InnerConfig, learning_rate
from flower_geo.training.tally import DeviceTally, HostTally, InnerResult, RoundSoFar, Tally

__all__ = ["InnerLoop", "not_finite"]

_CPU_RNG = "rng/cpu"
_CUDA_RNG = "rng/cuda"

#: Steps between two looks at a device that works behind the host's back.
LOOK_EVERY = 16


def not_finite(step: int, loss: float) -> TrainingError:
    """The error for a step (from 0) that is not taken."""
    return TrainingError(
        f"the loss or its gradient is not finite at local step {step + 1} "
        f"(loss {loss}); lower inner-lr, lengthen warmup-steps or look at the data"
    )


class InnerLoop:
    """Trains a causal language model in place.

    The random stream of dropout is the loop's own: it starts from torch's
    global state when the loop is built, is part of ``state_dict``, and is
    swapped in while ``run`` runs; the caller's random state stays as it was.

    Only parameters that require a gradient when ``run`` is called are trained.
    Which ones do may change from round to round: the optimizer keeps the state
    of the idle ones, and neither it nor weight decay touches them.

    Args:
        model: its forward takes ``input_ids``, ``labels`` and ``use_cache`` and
            returns ``.loss`` and ``.logits``, as causal models of transformers do.
        config: settings.

    Raises:
        TrainingError: the model has no parameter to train.
    """

    def __init__(self, model: nn.Module, config: InnerConfig) -> None:
        self.model = model
        self.config = config
        self._device = device_of(model)
        self._fused = self._device.type == "cuda"
        # A GPU runs behind the host; asking it for a number every step would
        # stop that.  There the optimizer itself skips a step that is not finite.
        self._deferred = self._fused
        self._parameters, self._optimizer = adopted(model, config, {}, None, fused=self._fused)
        self._rng = self._live_rng()
        self._running = False
        self._round: Round | None = None
        self._start = RoundStart(config.prox_mu)

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
        """Take optimizer steps.

        Local step k is taken at ``position + span * k / steps`` of the schedule.
        A step minimises the mean over the tokens to predict, of all its batches
        together; one without any such token is passed over and counts no token.

        Args:
            next_batch: gives ``LongTensor[batch, seq_len]`` of token ids, where every
                token after the first of a sequence is predicted, or a mapping with
                labels (see ``flower_geo.evaluation.batch``), best on the CPU.
            steps: steps of this round; None = as many as ``seconds`` allow.
            seconds: end after the step that reaches this time.  The schedule
                then advances by steps or by time, whichever is further.
            position: schedule position of the round's start.
            span: schedule steps the round stands for; None = ``steps``.
            on_step: called after each step with the number of steps done in
                this round and the step's loss, a 0-d tensor (reading it waits
                for the device).  The loop is whole at that moment: weights and
                ``state_dict`` may be copied, and an exception ends the run
                between two steps.
            start: first local step, for going on inside a round.
            carried: the part of the round done before, from :meth:`so_far`; the
                run goes on after it, and its result is that of the whole round.

        Raises:
            TrainingError: loss or gradient is not finite; weights and optimizer
                are as before that step.  Also for nothing to do, and for going on
                inside a round with a proximal term whose start is not known.
            DataError: a batch is not one.
        """
        if steps is None and seconds is None:
            raise TrainingError("the inner loop has no end; give steps or seconds")
        if steps is not None and start >= steps:
            raise TrainingError(f"no step is left: {start} of {steps} are done; give more steps")
        round_span = float(span if span is not None else steps or 0)
        tally = DeviceTally(self._device, carried) if self._deferred else HostTally(carried)
        if carried is not None:
            start = carried.steps
            if is_over(carried, steps, seconds):
                return tally.result(carried.seconds)
        began = time.perf_counter() - (carried.seconds if carried else 0.0)
        this = Round(next_batch, steps, seconds, position, round_span, on_step, tally, began, start)
        self._optimizer = self._adopt()
        self._start.begin(self._parameters, inside=start > 0)
        self._round = this
        with self._training():
            self._take(this)
            self._look(tally)
            self._settle()
        return tally.result(this.elapsed())

    def so_far(self) -> RoundSoFar:
        """The round up to the step just taken; for ``on_step``, and waits for the device.

        Raises:
            TrainingError: a step so far was not finite, or none is being taken.
        """
        if not self._running or self._round is None:
            raise TrainingError("no round is under way; ask from on_step")
        self._look(self._round.tally)
        return self._round.tally.so_far(self._round.elapsed())

    def state_dict(self) -> dict[str, Tensor]:
        """Optimizer state and random stream as CPU tensors, fit for safetensors.

        Keys: ``exp_avg/<parameter>``, ``exp_avg_sq/<parameter>`` (fp32),
        ``step/<parameter>`` (fp32 scalar), ``rng/cpu`` and on CUDA ``rng/cuda``
        (uint8).  Within a round with a proximal term also
        ``round_start/<parameter>``.  Weights are not part of it.
        """
        rng = self._live_rng() if self._running else self._rng
        copies = {name: state.clone() for name, state in rng.items()}
        start = self._start.state() if self._running else {}
        return flat_state(self._optimizer, self._parameters) | copies | start

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where ``state_dict`` was taken; with equal weights and batches, bit-equal.

        Raises:
            TrainingError: the state belongs to another model or optimizer.
        """
        moments = {
            key: value
            for key, value in state.items()
            if key not in (_CPU_RNG, _CUDA_RNG) and not key.startswith(START)
        }
        self._optimizer = self._adopt({key.partition("/")[2] for key in moments})
        load_flat_state(self._optimizer, self._parameters, moments)
        self._start.load(state)
        self._rng |= {name: state[name].clone() for name in self._rng if name in state}

    def _adopt(self, also: Collection[str] = ()) -> torch.optim.Optimizer:
        """The optimizer over all that is, was or is said to be trained; state goes along."""
        self._parameters, optimizer = adopted(
            self.model, self.config, self._parameters, self._optimizer,
            fused=self._fused, also=also,
        )  # fmt: skip
        return optimizer

    def _take(self, this: Round) -> None:
        """Take the round's steps."""
        while True:
            self._set_rate(this)
            this.stepped(self._step(this))
            if this.ends(self._settle):
                return

    def _set_rate(self, this: Round) -> None:
        rate = learning_rate(self.config, this.place())
        for group in self._optimizer.param_groups:
            group["lr"] = rate

    def _step(self, this: Round) -> Tensor:
        loss, tokens = self._backward(this.next_batch)
        if loss is None:
            this.tally.skip()
            return torch.zeros((), device=self._device)
        self._admit(this, loss, tokens)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._deferred and this.tally.steps % LOOK_EVERY == 0:
            self._look(this.tally)
        return loss

    def _admit(self, this: Round, loss: Tensor, tokens: int) -> Tensor:
        """Complete the gradient, count the step, refuse one that is not finite; its norm."""
        self._start.pull()
        norm = self._clipped_norm()
        this.tally.add(loss, norm, tokens, this.step)
        if isinstance(this.tally, DeviceTally):
            self._optimizer.found_inf = this.tally.bad()  # type: ignore[attr-defined]
        else:
            self._look(this.tally)
        return norm

    def _backward(self, next_batch: Callable[[], Batch]) -> tuple[Tensor | None, int]:
        """Gradient of the mean token loss over the accumulated batches; None for no token."""
        batches = [next_batch() for _ in range(self.config.grad_accum)]
        places = [None if isinstance(batch, Tensor) else counted(batch) for batch in batches]
        counts = [
            batch.shape[0] * (batch.shape[1] - 1) if isinstance(batch, Tensor) else len(found or ())
            for batch, found in zip(batches, places, strict=True)
        ]
        total = sum(counts)
        mean: Tensor | None = None
        for batch, found, count in zip(batches, places, counts, strict=True):
            with autocast(self.config.precision, self._device):
                if isinstance(batch, Tensor):
                    ids = batch.to(self._device, non_blocking=True)
                    loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
                elif found:
                    logits, targets = counted_logits(self.model, batch, found, self._device)
                    loss = functional.cross_entropy(logits, targets)
                else:
                    continue
            if count != total:
                loss = loss * (count / total)
            loss.backward()
            part = loss.detach()
            mean = part if mean is None else mean + part
        return mean, total

    def _clipped_norm(self) -> Tensor:
        parameters = self._parameters.values()
        if self.config.clip_norm:
            return nn.utils.clip_grad_norm_(parameters, self.config.clip_norm)
        return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])

    def _look(self, tally: Tally) -> None:
        """Raise when a step so far was not finite; waits for the device."""
        bad = tally.first_bad()
        if bad is None:
            return
        step, loss = bad
        self._optimizer.zero_grad(set_to_none=True)
        raise not_finite(step, loss)

    def _settle(self) -> None:
        if self._deferred and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _live_rng(self) -> dict[str, Tensor]:
        rng = {_CPU_RNG: torch.get_rng_state()}
        if self._device.type == "cuda":
            rng[_CUDA_RNG] = torch.cuda.get_rng_state(self._device)
        return rng

    def _set_rng(self, rng: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(rng[_CPU_RNG])
        if _CUDA_RNG in rng:
            torch.cuda.set_rng_state(rng[_CUDA_RNG], self._device)

    @contextmanager
    def _training(self) -> Iterator[None]:
        """Training mode and the loop's own random stream; both put back at the end."""
        callers, mode = self._live_rng(), self.model.training
        self._set_rng(self._rng)
        self._running = True
        self.model.train()
        self._optimizer.zero_grad(set_to_none=True)
        try:
            yield
        finally:
            self._running = False
            self._rng = self._live_rng()
            self._set_rng(callers)
            self.model.train(mode)
