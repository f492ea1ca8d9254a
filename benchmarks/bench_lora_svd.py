"""The best adapter of rank r for several sites: from their factors, and by the dense way.

    python -m benchmarks.bench_lora_svd            # a few minutes
    python -m benchmarks.bench_lora_svd --small    # a short form

The dense way forms the mean update, a matrix of the module's own size, and takes
its SVD.  ``torch.svd_lowrank``, which looks for r directions only, is measured on
the same dense matrix beside it.  Each way runs in processes of its own, with one
thread; the ways take turns.  Memory is what the peak of resident memory rises by
while it works, over the factors that are there before.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.figures import publish, run_python, table

SIZE, RANK, SITES, TURNS = 2048, 16, 8, 3
WAYS = {
    "factors": '`aggregate("svd", ...)`',
    "dense": "dense mean, `torch.linalg.svd`",
    "dense-lowrank": "dense mean, `torch.svd_lowrank`",
}
AIM_MEMORY, AIM_TIME = 1 / 10, 1 / 5

CHILD = """
import json, os, resource, sys, time
import torch
from flower_geo.aggregation.lora import aggregate
torch.set_num_threads(1)
way, size, rank, sites = sys.argv[1], *map(int, sys.argv[2:5])

def factors(size, rank, sites):
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(size, rank, generator=generator) * 0.01,
         torch.randn(rank, size, generator=generator) / size**0.5, 2.0)
        for _ in range(sites)
    ]

def work(parts, rank):
    weights = [float(1 + i) for i in range(len(parts))]
    if way == "factors":
        made = aggregate("svd", parts, weights, rank)
        return made.B, made.A, made.scale
    mean = torch.zeros(parts[0][0].shape[0], parts[0][1].shape[1])
    for weight, (b, a, scale) in zip(weights, parts):
        mean.addmm_(b, a, alpha=weight / sum(weights) * scale)
    if way == "dense":
        u, s, vh = torch.linalg.svd(mean, full_matrices=False)
    else:
        u, s, v = torch.svd_lowrank(mean, q=rank, niter=2)
        vh = v.T
    return u[:, :rank] * s[:rank], vh[:rank].contiguous(), 1.0

def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field))

work(factors(64, 4, 2), 4)  # what libraries keep from their first call on is not counted
parts = factors(size, rank, sites)
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = status("VmRSS")
began, began_cpu = time.perf_counter(), time.process_time()
b, a, scale = work(parts, rank)
seconds, cpu = time.perf_counter() - began, time.process_time() - began_cpu
peak = status("VmHWM")
weights = [float(1 + i) for i in range(sites)]
exact = sum(w / sum(weights) * s * (x.double() @ y.double())
            for w, (x, y, s) in zip(weights, parts))
error = float((exact - scale * (b.double() @ a.double())).norm() / exact.norm())
print(json.dumps({"mib": (peak - before) / 1024, "seconds": seconds, "cpu": cpu, "error": error}))
"""


def main(small: bool = False) -> dict[str, Any]:
    """Measure and publish."""
    size, turns = (512, 1) if small else (SIZE, TURNS)
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            runs[way].append(run_python(CHILD, way, str(size), str(RANK), str(SITES)))
    best = {
        way: {key: min(run[key] for run in each) for key in each[0]} for way, each in runs.items()
    }
    ours, dense = best["factors"], best["dense"]
    memory, seconds = ours["mib"] / dense["mib"], ours["cpu"] / dense["cpu"]
    rows = [
        [
            WAYS[way], each["mib"], each["mib"] / dense["mib"], each["cpu"],
            each["cpu"] / dense["cpu"], each["error"],
        ]
        for way, each in best.items()
    ]  # fmt: skip
    text = (
        f"One module of {size} x {size}, {SITES} sites of rank {RANK}, the mean's best adapter of "
        f"rank {RANK}. Seconds are of the processor, one thread; memory is the rise of the peak; "
        f"the least of {turns} turns. The error is to the exact mean, relative: that of the best "
        f"adapter of this rank cannot be less than the SVD's.\n\n"
        + table(["way", "memory, MiB", "of dense", "seconds", "of dense", "relative error"], rows)
        + f"\n\nMemory {memory:.3f} of the dense way's (aim: at most {AIM_MEMORY:.3g}), time "
        f"{seconds:.4f} (aim: at most {AIM_TIME:.3g})."
    )
    record = {"size": size, "rank": RANK, "sites": SITES, "best": best, "runs": runs}
    publish("lora-svd", "Best adapter without the dense matrix", text, record)
    return record


if __name__ == "__main__":
    main("--small" in sys.argv)
