"""Split learning against unsplit training of the same examples, on the same two cores.

The real strategy over one site of the real site code in one process, the cloud's half in
its real process, and the real gRPC stream with TLS between them.

    python -m benchmarks.bench_split            # several minutes on two quiet cores
    python -m benchmarks.bench_split --quick    # to see that it works
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import publish, run_python, table

__all__ = ["RUNS", "main", "page"]

#: What all runs have alike.
SETTINGS: dict[str, Any] = {
    "model": "llama-nano", "seq-len": 256, "batch-size": 4, "grad-accum": 8, "packing": True,
    "warmup-steps": 1, "eval-every": 0, "eval-tokens": 2048, "sample-tokens": 0, "min-sites": 1,
    "aggregation": "avg", "deadline": 600.0, "wait-for-sites": 5.0, "max-retries": 0,
    "codec-up": "fp32", "codec-down": "fp32",
}  # fmt: skip
VANILLA = {"mode": "vanilla", "cut-bottom": 2, "cut-top": 0, "in-flight": 8, "threads": 1}
INT8 = {"codec-activations": "int8(block=64)", "codec-gradients": "int8(block=64)"}
#: 50 ms round trip, 100 Mbit/s.
LINE = {"delay": 0.025, "rate": 12.5e6}
RUNS: dict[str, dict[str, Any]] = {
    "unsplit": {"keys": {"threads": 2}},
    "vanilla": {"keys": VANILLA},
    "u-shape": {"keys": VANILLA | {"mode": "u-shape", "cut-bottom": 1, "cut-top": 1}},
    "far": {"keys": VANILLA | INT8, **LINE},
    "far, one in flight": {"keys": VANILLA | INT8 | {"in-flight": 1}, **LINE},
}
NAMES = {
    "unsplit": "unsplit, 2 threads",
    "vanilla": "vanilla, 2 layers at the site",
    "u-shape": "U-shape, 1 and 1 layers at the site",
    "far": "vanilla, int8, 50 ms and 100 Mbit/s, in-flight=8",
    "far, one in flight": "the same, in-flight=1",
}
WANTED = {"vanilla": 0.85, "u-shape": 0.85, "far": 0.7}

ONE = """
import sys
from benchmarks.bench_split import one
one(sys.argv[1])
"""


@contextmanager
def relayed(delay: float, rate: float) -> Iterator[None]:
    """Tickets name a relay before the cloud's stream, in a process of its own."""
    from flower_geo.strategies.cloud import CloudProcess

    patched: Any = CloudProcess
    plain, relays = patched.ticket, dict[str, tuple[str, subprocess.Popen[str]]]()

    def ticket(cloud: CloudProcess, round: int, site: str) -> str:
        found = json.loads(plain(cloud, round, site))
        target = found["address"]
        if target not in relays:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.relayed", target, str(delay), str(rate)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )  # fmt: skip
            assert process.stdout is not None
            relays[target] = process.stdout.readline().strip(), process
        return json.dumps(found | {"address": relays[target][0]})

    patched.ticket = ticket
    try:
        yield
    finally:
        patched.ticket = plain
        for _, process in relays.values():
            process.communicate()


def one(text: str) -> None:
    """Run in this process and print tokens and seconds of each round."""
    from flower_geo.config import FedAvgLoRAConfig, SplitConfig, parse
    from flower_geo.observe import read_metrics
    from flower_geo.strategies import FedAvgLoRA, SplitFineTune, initial_arrays
    from tests.federation import MemoryGrid, sites

    run = json.loads(text)
    with tempfile.TemporaryDirectory() as folder:
        keys = {**SETTINGS, **run["keys"], "run-dir": f"{folder}/runs"}
        grid = MemoryGrid(sites(1, f"{folder}/state"))
        config: Any
        if "mode" in keys:
            config = parse(SplitConfig, keys)
            # Without a line to be slow, a relay would only take the processor's time.
            with relayed(run["delay"], run["rate"]) if "delay" in run else nullcontext():
                SplitFineTune(config).start(grid, initial_arrays(config))
        else:
            config = parse(FedAvgLoRAConfig, keys)
            FedAvgLoRA(config).start(grid, initial_arrays(config))
        events = read_metrics(Path(config.run_dir) / config.run_name / "metrics.jsonl")
    rounds = [e for e in events if e["event"] == "site" and e["status"] == "accepted"]
    print(json.dumps([[e["tokens"], e["seconds"]] for e in rounds]))


def main(quick: bool = False) -> dict[str, Any]:
    """Measure and publish."""
    sizes = {"rounds": 2, "inner-steps": 1} if quick else {"rounds": 6, "inner-steps": 4}
    load, found = os.getloadavg()[0], {}
    for name, run in RUNS.items():
        threads = run["keys"]["threads"]
        given = json.dumps(run | {"keys": run["keys"] | sizes})
        rounds = run_python(ONE, given, OMP_NUM_THREADS=str(threads), FLWR_TELEMETRY_ENABLED="0")
        found[name] = median(tokens / seconds for tokens, seconds in rounds[1:])
        print(name, found[name], flush=True)
    figures = {"rates": found, "load": load, "quick": quick, **sizes}
    publish("split-quick" if quick else "split", "Split learning", page(figures), figures)
    return figures


def page(figures: Mapping[str, Any]) -> str:
    """The section's text."""
    rates, load = figures["rates"], figures["load"]
    rows = [
        [NAMES[name], rate, rate / rates["unsplit"], WANTED.get(name, "")]
        for name, rate in rates.items()
    ]
    quiet = "" if load < 1 else (
        f" The machine was not quiet (load {load:.1f} before the first run): ratios are no more "
        "than a hint."
    )  # fmt: skip
    return (
        "llama-nano with LoRA, packed sequences of 256 tokens, eight micro-batches of four "
        "sequences a step. One thread at the site and one in the cloud's process, over the real "
        "stream with TLS. Counted are label tokens over the site's seconds of training, without "
        "evaluation; median over the rounds after the first." + quiet + "\n\n"
        + table(["run", "tokens/s", "of unsplit", "wanted"], rows)
    )  # fmt: skip


if __name__ == "__main__":
    main("--quick" in sys.argv)
