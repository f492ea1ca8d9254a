"""How much memory a run needs, before it starts."""

from __future__ import annotations

from dataclasses import dataclass

from flower_geo.models.build import meta_model
from flower_geo.models.state import vocab_rows

__all__ = ["MemoryEstimate", "memory_estimate"]

MIB = 1024**2
FP32 = 4

#: Resident size of Python with torch and transformers loaded.
SITE_BASE = 400 * MIB
#: The same for the coordinator, which also holds Flower's ServerApp.
SERVER_BASE = 500 * MIB
#: fp32 values a block keeps for its backward pass, per token and unit of width.
BLOCK_VALUES = 20
#: fp32 copies of the logits alive at once: logits, their log-softmax, their gradient.
LOGIT_COPIES = 3
#: fp32 model-sized tensors at a site: weights, gradients, two AdamW moments, the
#: round's start, the update, its residual.
SITE_COPIES = 7
#: At the coordinator: weights, master, shadow, the accumulator (fp64 counts
#: twice), outer momentum, and the checkpoint being written.
SERVER_COPIES = 7


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak memory in bytes: an estimate to warn by, not a bound.

    Attributes:
        parameters: trainable values, tied tensors once.
        site: of one site that trains.
        server: of the coordinator's ServerApp, whatever the number of sites.
    """

    parameters: int
    site: int
    server: int


def memory_estimate(spec: str, vocab_size: int | None, seq_len: int, batch: int) -> MemoryEstimate:
    """Estimate peak memory for fp32 training with AdamW.

    Args:
        spec: as for ``build_model``.
        vocab_size: rows of a named model's embedding; None = the table's.
        seq_len: tokens a sequence.
        batch: sequences of one forward pass (before accumulation).

    Raises:
        ModelError: the model is unknown or its config cannot be read.
    """
    model = meta_model(spec, vocab_size)
    config = model.config.get_text_config()
    count = sum(parameter.numel() for parameter in model.parameters())
    tokens = seq_len * batch
    blocks = BLOCK_VALUES * config.num_hidden_layers * config.hidden_size
    activations = FP32 * tokens * (blocks + LOGIT_COPIES * vocab_rows(model))
    return MemoryEstimate(
        parameters=count,
        site=SITE_BASE + SITE_COPIES * FP32 * count + activations,
        server=SERVER_BASE + SERVER_COPIES * FP32 * count,
    )
