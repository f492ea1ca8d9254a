"""A site of federated LoRA by Flower, PEFT and a plain loop alone.

Base, adapter and optimizer are made anew for each message, as Flower's own examples
do; the learning rate falls by a cosine from round to round.  The tokenised rows are
``flower_geo``'s, so that both train on the same ones.
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from transformers import AutoModelForCausalLM

from flower_geo.data import load_tokenizer
from flower_geo.data.instructions import (
    collate,
    instruction_spec,
    pad_id_of,
    prepare_instructions,
)
from flower_geo.site.identity import cache_folder

torch.set_num_threads(1)
app = ClientApp()


def tuned(config: Any) -> Any:
    """The base with a fresh adapter on all its linear layers."""
    base = AutoModelForCausalLM.from_pretrained(str(config["model"]), dtype=torch.float32)
    shape = LoraConfig(
        r=int(config["rank"]), lora_alpha=float(config["alpha"]),  # type: ignore[arg-type]
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    return get_peft_model(base, shape)


def learning_rate(config: Any, round: int) -> float:
    """Of a round: a cosine from the peak down to a tenth."""
    peak, share = float(config["inner-lr"]), (round - 1) / max(1, int(config["rounds"]))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * share)))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Some steps from the adapter received."""
    config = message.content.config_records["config"]
    node, round = context.node_config, int(config["server-round"])  # type: ignore[arg-type]
    words = load_tokenizer(str(config["tokenizer"]))
    spec = instruction_spec(
        "builtin", node, int(node["partition-id"]), int(node["num-partitions"])
    )  # fmt: skip
    rows = prepare_instructions(
        spec, words, seq_len=int(config["seq-len"]),  # type: ignore[arg-type]
        cache_dir=cache_folder(node),
    ).train  # fmt: skip
    model = tuned(config)
    arrays = message.content.array_records["arrays"]
    set_peft_model_state_dict(model, arrays.to_torch_state_dict())
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=learning_rate(config, round), weight_decay=0.0)
    draw = torch.Generator().manual_seed(1000 * int(config["seed"]) + round)  # type: ignore[arg-type]
    steps, size = int(config["inner-steps"]), int(config["batch-size"])  # type: ignore[arg-type]
    order = [i for _ in range(1 + steps * size // len(rows))
             for i in torch.randperm(len(rows), generator=draw).tolist()]  # fmt: skip
    model.train()
    began, total = time.time(), 0.0
    for step in range(steps):
        chosen = order[step * size : (step + 1) * size]
        loss = model(**collate([rows[i] for i in chosen], pad_id_of(words))).loss
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total += float(loss.detach())
    metrics: dict[str, Any] = {
        "num-examples": len(rows), "seconds": time.time() - began, "loss": total / steps,
    }  # fmt: skip
    record = RecordDict(
        {"arrays": ArrayRecord(get_peft_model_state_dict(model)), "metrics": MetricRecord(metrics)}
    )
    return Message(record, reply_to=message)
