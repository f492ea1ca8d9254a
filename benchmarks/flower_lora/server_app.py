"""Flower's own FedAvg over the adapters, with the moments of each round written down."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Result
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

app = ServerApp()


class Timed(FedAvg):
    """FedAvg that notes when a round began and ended, and what its sites took to train."""

    rounds: list[dict[str, Any]]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As FedAvg does."""
        messages = list(super().configure_train(server_round, arrays, config, grid))
        size = sum(len(array.data) for array in arrays.values())
        self.rounds.append({"began": time.time(), "bytes_down": size * len(messages)})
        return messages

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As FedAvg does."""
        replies = list(replies)
        found = super().aggregate_train(server_round, replies)
        good = [reply.content for reply in replies if reply.has_content()]
        self.rounds[-1] |= {
            "ended": time.time(),
            "seconds": [each.metric_records["metrics"]["seconds"] for each in good],
            "bytes_up": sum(
                len(array.data) for each in good for array in each.array_records["arrays"].values()
            ),
        }
        return found


def fedavg(grid: Grid, values: Mapping[str, Any]) -> tuple[Result, list[dict[str, Any]]]:
    """Run all rounds; the result, and what each round took."""
    torch.manual_seed(int(values["seed"]))
    base: Any = AutoModelForCausalLM.from_pretrained(str(values["model"]), dtype=torch.float32)
    shape = LoraConfig(
        r=int(values["rank"]), lora_alpha=float(values["alpha"]),  # type: ignore[arg-type]
        target_modules="all-linear", task_type="CAUSAL_LM",
    )  # fmt: skip
    start = ArrayRecord(get_peft_model_state_dict(get_peft_model(base, shape)))
    sites = int(values["clients"])
    strategy = Timed(
        fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites,
    )  # fmt: skip
    strategy.rounds = []
    result = strategy.start(
        grid, start, num_rounds=int(values["rounds"]), train_config=ConfigRecord(dict(values))
    )
    return result, strategy.rounds


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and write what came out."""
    result, rounds = fedavg(grid, context.run_config)
    out = Path(str(context.run_config["out"]))
    save_file(result.arrays.to_torch_state_dict(), out / "adapter.safetensors")
    # last: who waits for the run looks for this file
    (out / "rounds.json").write_text(json.dumps(rounds))
