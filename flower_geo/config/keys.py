"""The keys of a run's configuration, their defaults and ranges.

One frozen pydantic model a concern, composed into one model a strategy.  Field
names are Python's (``inner_steps``); users write them in kebab case
(``inner-steps``).  Every model is valid by its own defaults.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from flower_geo.config.names import check_name, kebab
from flower_geo.errors import ConfigError

__all__ = ["FIXED_KEYS", "TRAINING_KEYS", "CommonConfig", "DiLoCoConfig", "Scalar"]

Scalar = bool | int | float | str


#: Keys a site's computation depends on; they travel in the train request.
TRAINING_KEYS = frozenset(
    {
        "batch-size", "clip-norm", "codec-up", "data", "error-feedback", "eval-tokens",
        "feedback-decay", "feedback-dtype", "grad-accum", "inner-lr", "inner-optimizer",
        "inner-seconds", "inner-steps", "keep-optimizer", "min-lr-ratio", "model", "precision",
        "schedule", "seed", "seq-len", "snapshot-steps", "strategy", "threads", "tokenizer",
        "warmup-steps", "weight-by", "weight-decay",
    }
)  # fmt: skip

#: Of those, the ones that change nothing about what comes out.
_SAME_RESULT_KEYS = frozenset({"snapshot-steps"})

#: Keys a site may set for itself in its node-config.
_SITE_KEYS = frozenset(
    {
        "inner-steps", "inner-seconds", "batch-size", "grad-accum", "threads", "tokenizer",
        "snapshot-steps",
    }
)  # fmt: skip


class CommonConfig(BaseModel):
    """Keys shared by all ways of training."""

    model_config = ConfigDict(
        alias_generator=kebab, populate_by_name=True, extra="forbid", frozen=True,
        allow_inf_nan=False,
    )  # fmt: skip

    #: Keys a site's computation depends on, and keys a site may set for itself.
    training_keys: ClassVar[frozenset[str]] = TRAINING_KEYS
    site_keys: ClassVar[frozenset[str]] = _SITE_KEYS

    # -- the run --------------------------------------------------------------
    run_name: str = Field("diloco", description="names the run folder and the sites' state")
    run_dir: str = Field("runs", description="folder on the coordinator that holds run folders")
    rounds: Annotated[int, Field(ge=1, le=1_000_000)] = Field(20, description="rounds in all")
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        0, description="of initial weights and of the data's order"
    )

    # -- model and data -------------------------------------------------------
    model: str = Field("gpt2-nano", description="named shape, local folder, or hub name")
    tokenizer: str = Field("builtin", description="'builtin', a folder, or a hub name")
    data: str = Field("builtin", description="default for sites whose node-config has no data=")
    seq_len: Annotated[int, Field(ge=2, le=1_048_576)] = Field(128, description="tokens a sequence")
    eval_tokens: Annotated[int, Field(ge=0)] = Field(
        16_384, description="held-out tokens evaluated at a site; 0 = all"
    )
    eval_every: Annotated[int, Field(ge=0)] = Field(
        1, description="held-out evaluation every so many rounds; 0 = first and last only"
    )

    # -- the inner loop -------------------------------------------------------
    batch_size: Annotated[int, Field(ge=1)] = Field(8, description="sequences a batch")
    grad_accum: Annotated[int, Field(ge=1)] = Field(1, description="batches a step")
    inner_steps: Annotated[int, Field(ge=1)] = Field(20, description="H, local steps a round")
    inner_seconds: Annotated[float, Field(ge=0)] = Field(
        0.0, description="time-balanced rounds: stop after so many seconds; 0 = off"
    )
    inner_optimizer: Literal["adamw", "sgd"] = Field("adamw", description="betas 0.9, 0.95")
    inner_lr: Annotated[float, Field(gt=0)] = Field(1e-3, description="peak learning rate")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(20, description="of the whole run")
    schedule: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="over the whole run, not a round"
    )
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        0.1, description="last learning rate over the peak"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="not on norms and biases")
    clip_norm: Annotated[float, Field(ge=0)] = Field(1.0, description="0 = no clipping")
    precision: Literal["auto", "fp32", "bf16"] = Field(
        "auto", description="auto takes bf16 autocast on GPUs that have it"
    )
    threads: Annotated[int, Field(ge=0)] = Field(
        1, description="CPU threads a site trains with; 0 = torch's default"
    )
    keep_optimizer: bool = Field(True, description="inner optimizer lives on over rounds")
    snapshot_steps: Annotated[int, Field(ge=0)] = Field(
        50, description="inner steps between a site's snapshots within a round; 0 = none"
    )

    # -- the wire -------------------------------------------------------------
    codec_up: str = Field(
        "int8(block=256)", description="codec of the sites' updates; 'adaptive' = by site"
    )
    codec_down: str = Field(
        "int8(block=256)", description="codec of the broadcasts; 'adaptive' = by round"
    )
    dense_rounds: Annotated[int, Field(ge=0)] = Field(
        0, description="first rounds under dense-codec both ways, where a model moves most"
    )
    dense_last_rounds: Annotated[int, Field(ge=0)] = Field(
        0, description="last rounds under dense-codec both ways, so that what is owed arrives"
    )
    dense_codec: str = Field("int4(block=64)", description="codec of the dense rounds")
    codec_ladder: str = Field(
        "bf16 > int8(block=256) > int4(block=64) > topk(density=0.05,chunk=4096)|int4(block=64)",
        description="what 'adaptive' chooses from, least compressed first",
    )
    comm_target: str = Field(
        "20%", description="for 'adaptive': seconds a round may send, or a share of its time"
    )
    downlink_quantile: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of slow sites that 'adaptive' broadcasts do not wait for"
    )
    downlink_decay: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="share carried on of what coding a broadcast lost; 1 loses nothing"
    )
    error_feedback: bool = Field(True, description="send later what coding an update lost")
    feedback_decay: Annotated[float, Field(ge=0, le=1)] = Field(
        1.0, description="share of that carried on; 1 loses nothing"
    )
    feedback_dtype: Literal["fp32", "bf16"] = Field(
        "fp32", description="bf16 halves its memory, rounded stochastically"
    )

    # -- rounds ---------------------------------------------------------------
    quorum: str = Field("all", description="'all', a count such as '3', or a fraction '0.75'")
    deadline: Annotated[float, Field(gt=0)] = Field(3600.0, description="seconds a round may take")
    min_sites: Annotated[int, Field(ge=1)] = Field(
        1, description="sites to begin with, and good replies a commit needs"
    )
    wait_for_sites: Annotated[float, Field(gt=0)] = Field(
        120.0, description="seconds to wait for min-sites to connect"
    )
    max_staleness: Annotated[int, Field(ge=0)] = Field(
        0, description="rounds a late reply may be behind and still be folded"
    )
    strict_start: bool = Field(
        True, description="before the first commit, bad input at one site stops the run"
    )
    max_retries: Annotated[int, Field(ge=0)] = Field(
        2, description="tries more of a round with too few good replies"
    )
    max_norm_factor: Annotated[float, Field(ge=0)] = Field(
        10.0, description="refuse updates larger than this times the running median; 0 = off"
    )
    weight_by: Literal["tokens", "examples", "equal"] = Field(
        "tokens", description="weight of a site in the mean"
    )
    checkpoint_keep: Annotated[int, Field(ge=1)] = Field(3, description="newest checkpoints kept")
    grace: Annotated[float, Field(ge=0)] = Field(
        0.0, description="seconds a round goes on for stragglers once it has its quorum"
    )
    sites_per_round: str = Field(
        "all", description="sites a round needs, in turn: 'all', a count or a fraction"
    )
    over_provision: Annotated[float, Field(ge=0, le=10)] = Field(
        0.0, description="share of sites asked beyond sites-per-round, against dropouts"
    )
    staleness_weight: Literal["inverse", "equal", "drop"] = Field(
        "inverse", description="weight of a late reply: over 1 + rounds late, full, or never folded"
    )
    balance: Literal["off", "time"] = Field(
        "off", description="'time': slow sites take fewer steps, so that all end together"
    )
    max_loss_factor: Annotated[float, Field(ge=0)] = Field(
        3.0, description="refuse training losses above this times the running median; 0 = off"
    )
    max_claim_factor: Annotated[float, Field(ge=0)] = Field(
        4.0, description="tokens a site may claim, in multiples of those asked for; 0 = off"
    )

    sample_prompt: str = Field("It was a", description="what the final sample begins with")
    sample_tokens: Annotated[int, Field(ge=0, le=4096)] = Field(
        60, description="length of the final sample"
    )

    @field_validator("run_name")
    @classmethod
    def _run_name(cls, value: str) -> str:
        try:
            return check_name(value, "run-name")
        except ConfigError as error:
            raise ValueError(str(error)) from None

    @field_validator("quorum", "sites_per_round", mode="before")
    @classmethod
    def _amount(cls, value: object) -> str:
        text = str(value).strip()
        if text != "all":
            try:
                number = float(text)
            except ValueError:
                raise ValueError("must be 'all', a count or a fraction below 1") from None
            if not (0 < number < 1 or (number >= 1 and number.is_integer())):
                raise ValueError("must be 'all', a count of 1 or more, or a fraction below 1")
        return text

    @field_validator("comm_target", mode="before")
    @classmethod
    def _comm_target(cls, value: object) -> str:
        text = str(value).strip()
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            number = 0.0
        if isinstance(value, bool) or not 0 < number < (100 if text.endswith("%") else 1e6):
            raise ValueError("must be seconds such as '10', or a share below 100% such as '20%'")
        return text

    @model_validator(mode="after")
    def _together(self) -> CommonConfig:
        if self.warmup_steps > self.total_steps:
            raise ValueError(
                f"warmup-steps={self.warmup_steps} is longer than the whole run of "
                f"{self.total_steps} steps (rounds x inner-steps)"
            )
        if self.balance == "time" and self.inner_seconds:
            raise ValueError("balance='time' and inner-seconds are two ways to one end; use one")
        return self

    @property
    def total_steps(self) -> int:
        """Inner steps of a site that is there from the first round to the last."""
        return self.rounds * self.inner_steps

    def public(self) -> dict[str, Scalar]:
        """Kebab-case mapping of every key, as stored in ``config.json``."""
        return self.model_dump(by_alias=True)

    def fingerprint(self) -> str:
        """Hash of the keys that decide what a site computes in a round.

        Part of the key of a request: a cached reply answers only a request
        made under the very same training configuration.
        """
        public = self.public()
        deciding = self.training_keys - _SAME_RESULT_KEYS
        chosen = {key: public[key] for key in sorted(deciding) if key in public}
        chosen["total-steps"] = self.total_steps
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:16]

    def quorum_of(self, asked: int) -> int:
        """Good replies, out of ``asked`` sites, that let a round end early."""
        return _part(self.quorum, asked)

    def sites_of(self, ready: int) -> int:
        """Sites a round needs, out of ``ready``."""
        return _part(self.sites_per_round, ready)


def _part(text: str, whole: int) -> int:
    """``all``, a count or a fraction of ``whole``: at least 1, at most all of it."""
    if text == "all":
        return whole
    number = float(text)
    wanted = int(number) if number >= 1 else -int(-number * whole // 1)
    return max(1, min(whole, wanted))


#: Keys that may not change when a run is resumed.
FIXED_KEYS = frozenset(
    {
        "model", "tokenizer", "data", "seq-len", "seed", "strategy", "error-feedback", "codec-down",
        "aggregation", "rank", "alpha", "rslora", "target-modules", "rank-pattern",
        "alpha-pattern", "modules-to-save", "personal", "mode", "cut-bottom", "cut-top",
    }
)  # fmt: skip


class DiLoCoConfig(CommonConfig):
    """DiLoCo (arXiv:2311.08105): outer Nesterov SGD over pseudo-gradients."""

    strategy: Literal["diloco"] = Field("diloco", description="way of training")
    outer_lr: Annotated[float, Field(gt=0)] = Field(0.7, description="outer learning rate")
    outer_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(0.9, description="0 = plain SGD")
    outer_nesterov: bool = Field(True, description="Nesterov's form of momentum")
