"""Split-learning fine-tuning, the coordinator's side."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from flower_geo.config import SplitConfig, parse
from flower_geo.strategies import SplitFineTune, initial_arrays

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume the rounds named in the run configuration."""
    config = parse(SplitConfig, context.run_config)
    strategy = SplitFineTune(config)
    strategy.summary()
    strategy.start(grid, initial_arrays(config), num_rounds=config.rounds)
