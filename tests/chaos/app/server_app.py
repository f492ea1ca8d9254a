"""DiLoCo's coordinator that keeps the replies it folds, and may hear each one twice."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from flower_geo.aggregation import Contribution
from flower_geo.config import DiLoCoConfig, parse
from flower_geo.resilience.spool import SpooledReply
from flower_geo.strategies import DiLoCo, initial_arrays

app = ServerApp()
STAGE = Path(os.environ["CHAOS_STAGE"])


class KeepingDiLoCo(DiLoCo):
    """Copies what it folds into ``kept/``, for the replay afterwards."""

    def next_model(
        self,
        master: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        replies: Sequence[Contribution],
    ) -> dict[str, Tensor]:
        """Keep the replies, then fold them."""
        for reply in cast(Sequence[SpooledReply], replies):
            target = STAGE / "kept" / f"{reply.meta.payload_hash}-{reply.meta.staleness}"
            target.mkdir(parents=True, exist_ok=True)
            for name in ("blobs.safetensors", "reply.json"):
                if not (target / name).exists():
                    shutil.copyfile(reply.folder / name, target / f"{name}.part")
                    (target / f"{name}.part").rename(target / name)
        return super().next_model(master, base, replies)


class DoublingGrid:
    """Hands every reply over twice while ``misbehave/coordinator`` is there."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Replies that came, twice each if so told."""
        found = list(self._grid.pull_messages(message_ids))
        if found and (STAGE / "misbehave" / "coordinator").exists():
            return found + found
        return found


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume the rounds named in the run configuration."""
    config = parse(DiLoCoConfig, context.run_config)
    strategy = KeepingDiLoCo(config)
    strategy.start(cast(Grid, DoublingGrid(grid)), initial_arrays(config), config.rounds)
