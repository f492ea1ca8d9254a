"""Keys of federated fine-tuning with LoRA adapters."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from flower_geo.config.keys import TRAINING_KEYS, CommonConfig

__all__ = ["FedAvgLoRAConfig", "names_of", "numbers_of"]

#: Keys a site's computation depends on, beside those of every way of training.
_LORA_KEYS = frozenset(
    {
        "aggregation", "alpha", "alpha-pattern", "completion-only", "dropout", "exact-match",
        "inner-loop", "local-baseline", "modules-to-save", "packing", "personal", "prox-mu",
        "quantise", "rank", "rank-pattern", "rslora", "target-modules",
    }
)  # fmt: skip


class FedAvgLoRAConfig(CommonConfig):
    """LoRA adapters (arXiv:2106.09685), averaged as the updates they stand for."""

    training_keys: ClassVar[frozenset[str]] = TRAINING_KEYS | _LORA_KEYS

    strategy: Literal["fedavg-lora"] = Field("fedavg-lora", description="way of training")
    run_name: str = Field("fedavg-lora", description="names the run folder and the sites' state")
    model: str = Field("llama-nano", description="named shape, local folder, GGUF file or hub name")
    tokenizer: str = Field("builtin", description="'builtin', 'model', a folder, or a hub name")
    seq_len: Annotated[int, Field(ge=2, le=1_048_576)] = Field(
        256, description="longest example in tokens"
    )
    inner_lr: Annotated[float, Field(gt=0)] = Field(5e-4, description="peak learning rate")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="of the adapters")
    warmup_steps: Annotated[int, Field(ge=0)] = Field(10, description="of the whole run")
    sample_prompt: str = Field("What is AI?", description="question of the final sample")

    # -- the adapter ----------------------------------------------------------
    rank: Annotated[int, Field(ge=1, le=4096)] = Field(
        16, description="r; a site may set its own, up to this one"
    )
    alpha: Annotated[float, Field(gt=0)] = Field(
        32.0, description="scale is alpha over rank; a site may set its own"
    )
    rslora: bool = Field(False, description="scale is alpha over the root of rank")
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(0.0, description="of the adapters' input")
    target_modules: str = Field(
        "auto", description="'auto' = attention and MLP, or names with commas"
    )
    rank_pattern: str = Field("", description="other ranks, such as 'q_proj=8,v_proj=4'")
    alpha_pattern: str = Field("", description="other alphas, such as 'q_proj=16'")
    modules_to_save: str = Field("", description="modules trained and sent whole, with commas")
    quantise: Literal["none", "int8", "int4"] = Field(
        "none", description="base weights at the sites, by bitsandbytes"
    )

    # -- aggregation ----------------------------------------------------------
    aggregation: Literal["avg", "ffa", "stack", "residual", "svd", "alternate"] = Field(
        "svd", description="how the sites' adapters become one"
    )
    personal: str = Field(
        "", description="shell patterns of tensors that stay at the site, such as '*lora_B*'"
    )
    fold_rank: Annotated[int, Field(ge=0)] = Field(
        0, description="rank that 'residual' folds a round into the base with; 0 = exact"
    )
    server_optimizer: Literal["avg", "momentum", "adam", "yogi"] = Field(
        "avg", description="what the coordinator does with the mean"
    )
    server_lr: Annotated[float, Field(gt=0)] = Field(1.0, description="of the server optimizer")
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.9, description="of momentum; beta 1 of adam and yogi"
    )
    server_beta2: Annotated[float, Field(ge=0, lt=1)] = Field(0.99, description="of adam and yogi")
    server_tau: Annotated[float, Field(gt=0)] = Field(
        1e-3, description="added to the root of the second moment"
    )

    # -- local training -------------------------------------------------------
    inner_loop: Literal["lean", "trl"] = Field(
        "lean", description="our own loop, or TRL's SFTTrainer"
    )
    prox_mu: Annotated[float, Field(ge=0)] = Field(
        0.0, description="FedProx: pull towards the round's start; 0 = off"
    )
    completion_only: bool = Field(True, description="learn answers, not questions")
    packing: bool = Field(False, description="several examples a sequence")

    # -- evaluation and output ------------------------------------------------
    exact_match: Annotated[int, Field(ge=0)] = Field(
        0, description="held-out answers a site writes out and compares; 0 = off"
    )
    local_baseline: bool = Field(
        False, description="train each site alone as well, to compare; costs its training again"
    )
    server_data: str = Field(
        "", description="instructions of the coordinator's own to evaluate on; '' = none"
    )
    merge: bool = Field(False, description="write the merged model beside the adapter")

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _patterns(cls, value: str, info: ValidationInfo) -> str:
        whole = info.field_name == "rank_pattern"
        if any(number != int(number) for number in numbers_of(value).values() if whole):
            raise ValueError("ranks are whole numbers")
        return value

    @model_validator(mode="after")
    def _fitting(self) -> FedAvgLoRAConfig:
        if self.server_optimizer != "avg" and self.aggregation not in ("avg", "ffa"):
            raise ValueError(
                f"server-optimizer={self.server_optimizer!r} steps on averaged factors: it goes "
                "with aggregation 'avg' or 'ffa'"
            )
        if self.personal and self.aggregation != "avg":
            raise ValueError("personal= goes with aggregation='avg'")
        if self.quantise != "none" and self.aggregation in ("stack", "residual"):
            raise ValueError(
                f"aggregation={self.aggregation!r} folds into the base, which quantise= stores "
                "in too few bits; use 'svd'"
            )
        return self


def names_of(text: str) -> tuple[str, ...]:
    """``"a, b"`` -> ``("a", "b")``."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def numbers_of(text: str) -> dict[str, float]:
    """``"q_proj=8, v_proj=4"`` -> a mapping.

    Raises:
        ValueError: a part is no ``name=number`` with a number above 0.
    """
    found = {}
    for part in names_of(text):
        name, _, number = part.partition("=")
        try:
            value = float(number)
        except ValueError:
            value = 0.0
        if not name.strip() or not value > 0:
            raise ValueError(f"{part!r} is not of the form name=number, above 0")
        found[name.strip()] = value
    return found
