"""Federated LoRA, the coordinator's side."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_geo.config import FedAvgLoRAConfig, parse
from flower_geo.strategies import FedAvgLoRA, initial_arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume the rounds named in the run configuration."""
    config = parse(FedAvgLoRAConfig, context.run_config)
    strategy = FedAvgLoRA(config)
    strategy.summary()
    strategy.start(grid, initial_arrays(config), num_rounds=config.rounds)
