"""Peak memory of the coordinator against the number of sites.

Each count runs in a process of its own: the real strategy, round engine, spool
and checkpoints, over a grid that makes each site's reply at the moment it is
pulled.  The model is GPT-2 small's shape; two rounds are committed.
"""

from __future__ import annotations

import sys

from benchmarks.figures import publish, run_python, table

COUNTS = (2, 8, 32)

CHILD = """
import json, resource, sys, tempfile
from pathlib import Path
import torch
torch.set_num_threads(1)
from benchmarks.synthetic import SyntheticGrid, shapes
from flower_geo.compression import codec, pack
from flower_geo.config import DiLoCoConfig, parse
from flower_geo.strategies import DiLoCo
import flower_geo.strategies.model as model
count, small = int(sys.argv[1]), sys.argv[2] == "small"
model.RunModel.tokenizer_hash = "same"
model.RunModel.export = lambda self, weights, folder: folder.mkdir(exist_ok=True)
with tempfile.TemporaryDirectory() as folder:
    config = parse(DiLoCoConfig, {
        "run-dir": folder, "rounds": 2, "eval-every": 0, "sample-tokens": 0, "min-sites": count,
        "warmup-steps": 0, "max-norm-factor": 0.0,
    })
    weights = {name: torch.zeros(shape) for name, shape in shapes(small)}
    parameters = sum(t.numel() for t in weights.values())
    arrays = pack(weights, codec("fp32"))
    del weights
    DiLoCo(config).start(SyntheticGrid(count, shapes(small)), arrays, num_rounds=2)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"sites": count, "peak_mib": peak, "parameters": parameters}))
"""


def main(small: bool = False) -> list[dict[str, float]]:
    """Measure and publish."""
    rows = [run_python(CHILD, str(count), "small" if small else "full") for count in COUNTS]
    model_mib = rows[0]["parameters"] * 4 / 2**20
    first = rows[0]["peak_mib"]
    text = table(
        ["sites", "peak RSS, MiB", "against 2 sites", "in fp32 models"],
        [
            [r["sites"], round(r["peak_mib"]), r["peak_mib"] / first, r["peak_mib"] / model_mib]
            for r in rows
        ],
    )
    publish(
        "server-memory", "Memory of the coordinator",
        f"{rows[0]['parameters'] / 1e6:.1f} M parameters ({model_mib:.0f} MiB in fp32), "
        f"int8 updates, two rounds.\n\n{text}", rows,
    )  # fmt: skip
    return rows


if __name__ == "__main__":
    main("--small" in sys.argv)
