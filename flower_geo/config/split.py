"""Keys of split-learning fine-tuning."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from flower_geo.config.lora import FedAvgLoRAConfig

__all__ = ["SplitConfig"]

#: Keys a site's computation depends on, beside those of every adapter.
_SPLIT_KEYS = frozenset(
    {
        "activation-noise", "align-every", "codec-activations", "codec-gradients", "cut-bottom",
        "cut-top", "delta-coding", "in-flight", "mode", "stream-deadline",
    }
)  # fmt: skip


class SplitConfig(FedAvgLoRAConfig):
    """The bottom of a model at the sites, the middle in the cloud, LoRA on both."""

    training_keys: ClassVar[frozenset[str]] = FedAvgLoRAConfig.training_keys | _SPLIT_KEYS

    strategy: Literal["split"] = Field("split", description="way of training")  # type: ignore[assignment]
    run_name: str = Field("split", description="names the run folder and the sites' state")

    # -- the cut --------------------------------------------------------------
    mode: Literal["vanilla", "u-shape", "sfl-v1", "sfl-v2", "cse", "sage"] = Field(
        "u-shape", description="what crosses the cut, and whose half learns when"
    )
    cut_bottom: Annotated[int, Field(ge=0)] = Field(
        1, description="first layers, which lie at the site with the embeddings"
    )
    cut_top: Annotated[int, Field(ge=0)] = Field(
        1, description="last layers, at the site with the head; only with mode='u-shape'"
    )
    align_every: Annotated[int, Field(ge=1)] = Field(
        10, description="steps between two alignments of the auxiliary model; mode='sage'"
    )

    # -- the stream -----------------------------------------------------------
    in_flight: Annotated[int, Field(ge=1, le=256)] = Field(
        4, description="micro-batches (grad-accum) of a step on the wire at once"
    )
    codec_activations: str = Field("bf16", description="codec of what sites send of a batch")
    codec_gradients: str = Field("bf16", description="codec of what comes back")
    delta_coding: bool = Field(
        False, description="send what changed since the same example was last sent (AQ-SGD)"
    )
    activation_noise: Annotated[float, Field(ge=0)] = Field(
        0.0, description="noise on activations, as a share of each token's own size"
    )
    stream_host: str = Field(
        "127.0.0.1", description="address that sites dial; the coordinator's as they see it"
    )
    stream_bind: str = Field("127.0.0.1", description="address that the cloud half listens on")
    stream_port: Annotated[int, Field(ge=0, le=65535)] = Field(
        0, description="port it listens on; 0 = any free one"
    )
    stream_certificate: str = Field(
        "", description="PEM file for stream-host; '' = one made for this run"
    )
    stream_key: str = Field("", description="PEM file of the certificate's key")
    stream_deadline: Annotated[float, Field(gt=0)] = Field(
        120.0, description="seconds a broken stream, or a site that is away, is waited for"
    )

    @model_validator(mode="after")
    def _sound(self) -> SplitConfig:
        refused = {
            "inner-loop": (self.inner_loop, "lean"), "quantise": (self.quantise, "none"),
            "personal": (self.personal, ""), "local-baseline": (self.local_baseline, False),
            "exact-match": (self.exact_match, 0), "modules-to-save": (self.modules_to_save, ""),
            "inner-seconds": (self.inner_seconds, 0.0), "balance": (self.balance, "off"),
        }  # fmt: skip
        for key, (value, only) in refused.items():
            if value != only:
                raise ValueError(f"{key}={value!r} does not go with split learning; use {only!r}")
        if self.aggregation not in ("avg", "svd"):
            raise ValueError(
                f"aggregation={self.aggregation!r} does not go with split learning, where the "
                "cloud's half is trained in the stream; use 'avg' or 'svd'"
            )
        if (self.mode == "u-shape") != (self.cut_top > 0):
            raise ValueError(
                f"mode={self.mode!r} does not go with cut-top={self.cut_top}: a U-shape keeps the "
                "last layers at the site (1 or more), every other mode none (0)"
            )
        if bool(self.stream_certificate) != bool(self.stream_key):
            raise ValueError("stream-certificate and stream-key go together; give both or none")
        return self
