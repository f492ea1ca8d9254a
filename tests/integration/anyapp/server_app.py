"""A server with one of Flower's own strategies, wrapped unless ``downlink`` is empty."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
from client_app import initial  # type: ignore[import-not-found]
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp, strategy

from flower_geo.compression.wrapper import CompressedStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and write what came out."""
    config, clients = context.run_config, int(context.run_config["clients"])
    counts = dict.fromkeys(
        ("min_train_nodes", "min_evaluate_nodes", "min_available_nodes"), clients
    )
    # With malicious nodes to leave out, Krum's two nearest would tie, and their order decide.
    own: dict[str, dict[str, Any]] = {"FedAdam": {"eta": 0.01}, "Krum": {"num_malicious_nodes": 0}}
    name = str(config["strategy"])
    chosen = getattr(strategy, name)(**counts, **own.get(name, {}))
    if config["downlink"]:
        chosen = CompressedStrategy(chosen, str(config["uplink"]), str(config["downlink"]))
    random.seed(0)
    result = chosen.start(grid=grid, initial_arrays=initial(), num_rounds=int(config["rounds"]))
    out = Path(str(config["out"]))
    metrics = {
        "train": {n: dict(m) for n, m in result.train_metrics_clientapp.items()},
        "evaluate": {n: dict(m) for n, m in result.evaluate_metrics_clientapp.items()},
        "traffic": vars(chosen.traffic) if config["downlink"] else {},
    }
    np.savez(out.with_suffix(".npz"), **{n: a.numpy() for n, a in result.arrays.items()})
    # last: who waits for the run looks for this file
    out.write_text(json.dumps(metrics))
