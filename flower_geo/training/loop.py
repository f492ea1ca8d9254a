"""The inner loop: local training steps of one site.

One loop lives over a site's rounds: the model's weights change at a round's
start, the optimizer's moments stay.  The learning rate is a function of the
position in the whole run's schedule, never of the round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from flower_geo.errors import TrainingError
from flower_geo.training.optimizer import build_optimizer, flat_state, load_flat_state
from flower_geo.training.precision import autocast, device_of
from flower_geo.training.schedule import InnerConfig, learning_rate
from flower_geo.training.tally import DeviceTally, HostTally, InnerResult, RoundSoFar, Tally

__all__ = ["InnerLoop"]

_CPU_RNG = "rng/cpu"
_CUDA_RNG = "rng/cuda"

#: Steps between two looks at a device that works behind the host's back.
LOOK_EVERY = 16


class InnerLoop:
    """Trains a causal language model in place.

    The random stream of dropout is the loop's own: it starts from torch's
    global state when the loop is built, is part of ``state_dict``, and is
    swapped in while ``run`` runs; the caller's random state stays as it was.

    Args:
        model: its forward takes ``input_ids``, ``labels`` and ``use_cache`` and
            returns ``.loss``, as causal models of transformers do.  Parameters
            that require no gradient are left alone.
        config: settings.

    Raises:
        TrainingError: the model has no parameter to train.
    """

    def __init__(self, model: nn.Module, config: InnerConfig) -> None:
        self.model = model
        self.config = config
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self._parameters:
            raise TrainingError("the model has no trainable parameter; unfreeze some of it")
        self._device = device_of(model)
        # A GPU runs behind the host; asking it for a number every step would
        # stop that.  There the optimizer itself skips a step that is not finite.
        self._deferred = self._device.type == "cuda"
        self._optimizer = build_optimizer(self._parameters, config, fused=self._deferred)
        self._rng = self._live_rng()
        self._running = False
        self._tally: Tally | None = None
        self._began = 0.0

    def run(
        self,
        next_batch: Callable[[], Tensor],
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

        Args:
            next_batch: gives ``LongTensor[batch, seq_len]`` of token ids; every
                token after the first of a sequence is predicted.
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
                are as before that step.  Also for nothing to do.
        """
        if steps is None and seconds is None:
            raise TrainingError("the inner loop has no end; give steps or seconds")
        if steps is not None and start >= steps:
            raise TrainingError(f"no step is left: {start} of {steps} are done; give more steps")
        round_span = float(span if span is not None else steps or 0)
        tally = DeviceTally(self._device, carried) if self._deferred else HostTally(carried)
        if carried is not None:
            start = carried.steps
            if _over(carried, steps, seconds):
                return tally.result(carried.seconds)
        began = time.perf_counter() - (carried.seconds if carried else 0.0)
        self._tally, self._began = tally, began
        with self._training():
            step = start
            while True:
                elapsed = time.perf_counter() - began
                done = _share(step, steps, elapsed, seconds, round_span)
                loss = self._step(next_batch, step, position + done, tally)
                step += 1
                if on_step is not None:
                    on_step(step, loss)
                if step == steps:
                    break
                if seconds is not None:
                    self._settle()
                    if time.perf_counter() - began >= seconds:
                        break
            self._look(tally)
            self._settle()
        return tally.result(time.perf_counter() - began)

    def so_far(self) -> RoundSoFar:
        """The round up to the step just taken; for ``on_step``, and waits for the device.

        Raises:
            TrainingError: a step so far was not finite, or none is being taken.
        """
        if not self._running or self._tally is None:
            raise TrainingError("no round is under way; ask from on_step")
        self._look(self._tally)
        return self._tally.so_far(time.perf_counter() - self._began)

    def state_dict(self) -> dict[str, Tensor]:
        """Optimizer state and random stream as CPU tensors, fit for safetensors.

        Keys: ``exp_avg/<parameter>``, ``exp_avg_sq/<parameter>`` (fp32),
        ``step/<parameter>`` (fp32 scalar), ``rng/cpu`` and on CUDA ``rng/cuda``
        (uint8).  Weights are not part of it.
        """
        rng = self._live_rng() if self._running else self._rng
        copies = {name: state.clone() for name, state in rng.items()}
        return flat_state(self._optimizer, self._parameters) | copies

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on where ``state_dict`` was taken; with equal weights and batches, bit-equal.

        Raises:
            TrainingError: the state belongs to another model or optimizer.
        """
        load_flat_state(
            self._optimizer,
            self._parameters,
            {k: v for k, v in state.items() if k not in (_CPU_RNG, _CUDA_RNG)},
        )
        self._rng |= {name: state[name].clone() for name in self._rng if name in state}

    def _step(
        self, next_batch: Callable[[], Tensor], step: int, position: float, tally: Tally
    ) -> Tensor:
        rate = learning_rate(self.config, position)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss, tokens = self._backward(next_batch)
        norm = self._clipped_norm()
        tally.add(loss, norm, tokens, step)
        if isinstance(tally, DeviceTally):
            self._optimizer.found_inf = tally.bad()  # type: ignore[attr-defined]
        else:
            self._look(tally)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._deferred and tally.steps % LOOK_EVERY == 0:
            self._look(tally)
        return loss

    def _backward(self, next_batch: Callable[[], Tensor]) -> tuple[Tensor, int]:
        """Gradient of the mean token loss over the accumulated batches."""
        batches = [next_batch() for _ in range(self.config.grad_accum)]
        counts = [batch.shape[0] * (batch.shape[1] - 1) for batch in batches]
        total = sum(counts)
        mean: Tensor | None = None
        for batch, count in zip(batches, counts, strict=True):
            ids = batch.to(self._device, non_blocking=True)
            with autocast(self.config.precision, self._device):
                loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
            if count != total:
                loss = loss * (count / total)
            loss.backward()
            part = loss.detach()
            mean = part if mean is None else mean + part
        assert mean is not None
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
        raise TrainingError(
            f"the loss or its gradient is not finite at local step {step + 1} "
            f"(loss {loss}); lower inner-lr, lengthen warmup-steps or look at the data"
        )

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


def _over(carried: RoundSoFar, steps: int | None, seconds: float | None) -> bool:
    """Whether nothing is left of a round that was broken off."""
    by_steps = steps is not None and carried.steps >= steps
    return by_steps or (seconds is not None and carried.seconds >= seconds)


def _share(
    step: int, steps: int | None, elapsed: float, seconds: float | None, span: float
) -> float:
    """Schedule steps of this round that lie before local step ``step``."""
    # span * step / steps in this order: with span == steps it is the whole number ``step``.
    by_steps = span * step / steps if steps else 0.0
    if seconds is None:
        return by_steps
    by_time = span * min(elapsed / seconds, 1.0) if seconds > 0 else 0.0
    return max(by_steps, by_time)
