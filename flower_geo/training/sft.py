"""The inner loop by TRL: an ``SFTTrainer`` that is built once and runs round after round.

What the trainer lacks for rounds is added here and nowhere else: one schedule
over the whole run, optimizer state and random stream that the caller carries,
batches in the caller's order, an end by steps or by time, and no file, no
network call, no report and no output.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flower_geo.errors import TrainingError
from flower_geo.evaluation.batch import Batch, counted, model_inputs
from flower_geo.evaluation.precision import autocast
from flower_geo.training.loop import InnerLoop
from flower_geo.training.rounds import Round
from flower_geo.training.schedule import InnerConfig

__all__ = ["TrlLoop"]

#: Optimizer steps of a round that only time ends.
NO_END = 2**31 - 1

#: On a trainer's forward: the model's own that it stands on; None = that of its class.
_UNDER = "flower_geo_under"


class TrlLoop(InnerLoop):
    """An inner loop whose forward, loss and backward are those of TRL's ``SFTTrainer``.

    Best built once a model and kept: ``run``, ``state_dict`` and
    ``load_state_dict`` are those of :class:`InnerLoop`, and agree with it to
    rounding.  The trainer replaces the model's forward by one of its own that
    behaves as before for everybody else; a later loop on the model replaces it
    again and puts none on top.  Trained parameters keep their number format,
    also on a quantised base.

    Args:
        model: a causal model of transformers, or a PEFT model around one.
        config: settings.

    Raises:
        TrainingError: TRL is not installed, it does not take this model, or the
            model has no parameter to train.
    """

    def __init__(self, model: nn.Module, config: InnerConfig) -> None:
        super().__init__(model, config)
        # The trainer asks the device for numbers at each step anyway.
        self._deferred = False
        with _callers_world(model), _same_numbers(model), _one_head(model):
            self._trainer = _build(model, config, self._device)
        self._trainer.rounds = self

    def _take(self, this: Round) -> None:
        trainer = self._trainer
        if getattr(trainer.optimizer, "optimizer", None) is not self._optimizer:
            trainer.optimizer = self._optimizer  # the set of trained parameters has changed
        trainer.args.max_steps = NO_END if this.steps is None else this.steps - this.step
        trainer.this = this
        try:
            trainer.train()
        finally:
            trainer.this = None
            self._optimizer.zero_grad(set_to_none=True)


def _build(model: nn.Module, config: InnerConfig, device: torch.device) -> Any:
    try:
        from datasets import Dataset
        from trl.trainer.sft_config import SFTConfig
    except ImportError as error:
        raise TrainingError(
            f"training by TRL needs what is not installed ({error}); "
            "install flower-geo[align] or use the lean loop"
        ) from error
    with tempfile.TemporaryDirectory() as folder:  # it insists on one, and writes nothing there
        arguments = SFTConfig(
            output_dir=folder, use_cpu=device.type == "cpu",
            bf16=False, activation_checkpointing=False,  # autocast and checkpoints are the caller's
            gradient_accumulation_steps=config.grad_accum, max_steps=1,
            max_grad_norm=config.clip_norm or float("inf"),
            save_strategy="no", eval_strategy="no", logging_strategy="no", report_to="none",
            disable_tqdm=True, logging_nan_inf_filter=False, push_to_hub=False,
            remove_unused_columns=False, dataloader_num_workers=0, dataloader_pin_memory=False,
            max_length=None, shuffle_dataset=False, dataset_kwargs={"skip_prepare_dataset": True},
        )  # fmt: skip
        if arguments.device != device:
            raise TrainingError(
                f"TRL trains on {arguments.device} and the model is on {device}; make that the "
                "only visible device (CUDA_VISIBLE_DEVICES) or use the lean loop"
            )
        arguments._n_gpu = 1  # it has seen every GPU, and would spread over them
        try:
            return _trainer_class()(
                model=model, args=arguments, processing_class=_no_tokenizer(),
                # A look at one row is all it wants; batches come from the round.
                train_dataset=Dataset.from_dict({"input_ids": [[0]], "labels": [[0]]}),
                data_collator=list, optimizers=(torch.optim.SGD(model.parameters()), None),
            )  # fmt: skip
        except (ValueError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise TrainingError(
                f"TRL does not train this model: {reason} Use the lean loop for it."
            ) from error


@cache
def _trainer_class() -> Any:
    """The trainer, defined when first wanted: a site of the lean loop never imports TRL."""
    from transformers import PrinterCallback, TrainerCallback
    from trl.trainer.sft_trainer import SFTTrainer

    class Between(TrainerCallback):
        """Before and after each optimizer step."""

        def __init__(self, trainer: Any) -> None:
            self.trainer = trainer

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            self.trainer.rounds._set_rate(self.trainer.this)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            trainer = self.trainer
            trainer.this.stepped(trainer.loss)
            if trainer.this.ends(trainer.rounds._settle):
                control.should_training_stop = True

    base: Any = SFTTrainer  # comes without types worth having

    class RoundTrainer(base):  # type: ignore[misc]
        """Takes its batches from a round and leaves every decision between steps to the loop."""

        _tag_names = ()
        loss_is_scaled_for_ga = True  # divided by the tokens of the whole step
        rounds: TrlLoop
        this: Round | None = None
        loss: Tensor
        tokens = 0

        def __init__(self, **values: Any) -> None:
            super().__init__(**values)
            # Only asked to put its special tokens into the model's configuration.
            self.processing_class = None
            # It would collect garbage before each round: a quarter of a second or more.
            self.accelerator.free_memory = self._let_go
            self.remove_callback(PrinterCallback)
            self.add_callback(Between(self))

        def _let_go(self, *_: Any) -> None:
            self.accelerator._models, self.accelerator._optimizers = [], []

        def _send_telemetry(self) -> None:
            pass

        def create_scheduler(self, *_: Any, **__: Any) -> Any:
            self.lr_scheduler = _Unscheduled()
            return self.lr_scheduler

        def get_train_dataloader(self) -> Any:
            assert self.this is not None
            return _Feed(self.this.next_batch)

        def get_batch_samples(
            self, epoch_iterator: Iterator[Batch], num_batches: int, device: Any
        ) -> tuple[list[dict[str, Tensor]], Tensor]:
            batches = [_labelled(next(epoch_iterator)) for _ in range(num_batches)]
            self.tokens = sum(len(counted(batch)) for batch in batches)
            self.loss = torch.zeros((), device=device)
            return batches, torch.tensor(self.tokens, device=device)

        def _prepare_inputs(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            device = self.rounds._device
            mask = {"attention_mask": inputs["attention_mask"]}
            given = model_inputs(inputs, device)
            if "position_ids" not in given:  # it counts tokens by one or the other
                given |= {name: tensor.to(device) for name, tensor in mask.items()}
            return given | {"labels": inputs["labels"].to(device)}

        def compute_loss_context_manager(self) -> Any:
            return autocast(self.rounds.config.precision, self.rounds._device)

        def training_step(self, *values: Any, **named: Any) -> Tensor:
            loss: Tensor = super().training_step(*values, **named)
            self.loss = self.loss + loss
            return loss

        def _clip_grad_norm(self, model: nn.Module) -> Tensor:
            """Called with the whole gradient of a step, before the optimizer's."""
            assert self.this is not None
            if self.tokens:
                return self.rounds._admit(self.this, self.loss, self.tokens)
            self.this.tally.skip()
            self.rounds._optimizer.zero_grad(set_to_none=True)  # no gradient, no step
            return torch.zeros(())

        def floating_point_ops(self, inputs: Any) -> int:
            return 0

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            self._metrics["train"].clear()

    return RoundTrainer


class _Feed:
    """The round's batches, without a length and without reading ahead."""

    def __init__(self, next_batch: Callable[[], Batch]) -> None:
        self._next = next_batch

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._next()


class _Unscheduled:
    """Stands where a scheduler is expected; the loop sets the rate."""

    def step(self) -> None:
        pass

    def get_last_lr(self) -> list[float]:
        return [0.0]  # for a log that is not kept


def _labelled(batch: Batch) -> dict[str, Tensor]:
    """A batch with labels and a mask, whatever form it came in."""
    values = {"input_ids": batch, "labels": batch} if isinstance(batch, Tensor) else dict(batch)
    if "attention_mask" not in values:
        values["attention_mask"] = torch.ones_like(values["input_ids"])
    return values


def _no_tokenizer() -> Any:
    """A tokenizer of one token: rows come tokenised, and the trainer must not look for one."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=Tokenizer(WordLevel({"-": 0}, unk_token="-")), eos_token="-", pad_token="-"
    )


@contextmanager
def _same_numbers(model: nn.Module) -> Iterator[None]:
    """Put back trained parameters: on a quantised base TRL rounds them to bf16 for good.

    Their updates are smaller than bf16 tells apart, and what a site loads, sends
    and keeps is fp32.
    """
    kept = [(p, p.data) for p in model.parameters() if p.requires_grad]
    try:
        yield
    finally:
        for parameter, data in kept:
            if parameter.dtype != data.dtype:
                parameter.data = data


@contextmanager
def _one_head(model: nn.Module) -> Iterator[None]:
    """Take off the forward that an earlier trainer put on, before the next one puts on its own.

    Each would call the one before it: a step slower and a frame deeper a round.
    """
    plain = getattr(model, "get_base_model", lambda: model)()
    worn = vars(plain).get("forward")
    before = getattr(worn, _UNDER, worn)
    if before is not worn:
        _wear(plain, before)
    yield
    mine = vars(plain).get("forward")
    if mine is not None and mine is not before:
        setattr(mine.__func__, _UNDER, before)


def _wear(model: Any, forward: Any) -> None:
    """Give a model a forward of its own; None = that of its class."""
    if forward is None:
        del model.forward
    else:
        model.forward = forward


@contextmanager
def _callers_world(model: nn.Module) -> Iterator[None]:
    """Put back what building a trainer changes: every random state, and the cache setting."""
    settings = getattr(model, "config", None)
    use_cache = getattr(settings, "use_cache", None)
    own, numpys = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(own)
        np.random.set_state(numpys)
        if settings is not None and use_cache is not None:
            settings.use_cache = use_cache
