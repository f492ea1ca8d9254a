"""How fast this machine trains through a model's layers."""

from __future__ import annotations

import copy
import time
from typing import Any

import torch

from flower_geo.errors import ModelError
from flower_geo.models.build import apart_from_random, model_config
from flower_geo.models.split.sizes import layer_flops

__all__ = ["layer_speed"]

#: Rows of the probe's embedding, which takes no part in what is measured.
_ROWS = 8


def layer_speed(
    spec: str, length: int, batch: int, *, seconds: float = 1.0, device: str = "cpu"
) -> float:
    """Measured speed of forward and backward through one frozen layer, in FLOP/s.

    A layer of random weights in fp32 is built for it.  The best of several passes
    counts: what else the machine does makes the others slower.

    Args:
        spec: as for ``build_model``; only its config is read.
        length: tokens a sequence.
        batch: sequences a pass.
        seconds: how long to try, about, after a first pass.
        device: where.

    Raises:
        ModelError: the model is unknown, or has no such layers.
    """
    from transformers import AutoModelForCausalLM

    config = _of_one_layer(spec, length)
    build: Any = AutoModelForCausalLM.from_config
    try:
        with apart_from_random():
            model: Any = build(config, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError) as error:
        raise ModelError(
            f"one layer of {spec} cannot be built to measure this machine's speed; "
            "give --site-gflops and --cloud-gflops"
        ) from error
    model = model.requires_grad_(False).to(device)
    inputs = torch.zeros(batch, length, config.hidden_size, device=device, requires_grad=True)
    decoder = model.base_model

    def once() -> float:
        began = time.perf_counter()
        hidden = decoder(inputs_embeds=inputs, use_cache=False).last_hidden_state
        (gradient,) = torch.autograd.grad(hidden.sum(), inputs)
        float(gradient[0, 0, 0])  # a GPU has ended by then
        return time.perf_counter() - began

    once()
    best, began = once(), time.perf_counter()
    while time.perf_counter() - began < seconds:
        best = min(best, once())
    return layer_flops(model, length) * batch * length / best


def _of_one_layer(spec: str, length: int) -> Any:
    config: Any = copy.deepcopy(model_config(spec, max_seq_len=length))
    config.num_hidden_layers = 1
    config.vocab_size = _ROWS
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, None)
    kinds = getattr(config, "layer_types", None)
    if kinds:
        config.layer_types = kinds[:1]
    return config
