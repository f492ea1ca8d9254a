"""What faults cost, on real processes: a SuperLink, SuperNodes, ClientApps and workers.

Three parts, each a run of ``flower-geo run`` as people start it:

* workers killed with -9 in the middle of a round: steps lost, and seconds until the
  next step is done, with what loading the model takes measured apart;
* four sites, of which one dies in each round (SuperNode, ClientApp and worker, started
  again at once), against the same run undisturbed;
* a round's time outside training: a site with a warm worker beside one that trains in
  the ClientApp's own process, in one run.

    python -m benchmarks.bench_faults           # about eighteen minutes on two cores
    python -m benchmarks.bench_faults --quick   # four, to see that it works
    python -m benchmarks.bench_faults --outside # the last part anew, beside the others as known
    python -m benchmarks.bench_faults --dying   # the second part anew, about fourteen minutes
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.deployed import Deployment, deployed
from benchmarks.figures import output_folder, publish, run_python, table

SETTINGS: dict[str, Any] = {
    "model": "gpt2-nano", "seq-len": 128, "batch-size": 8, "eval-every": 0, "eval-tokens": 2048,
    "sample-tokens": 0, "warmup-steps": 10, "wait-for-sites": 240.0,
}  # fmt: skip
#: As somebody with four sites may set it: nobody is left out, a dead one is waited for.
PATIENT: dict[str, Any] = {
    "quorum": "all", "deadline": 600.0, "max-staleness": 2, "min-sites": 2, "snapshot-steps": 20,
}  # fmt: skip
EVAL_TOKENS = 32_768

LOAD = """
import json, sys, time
import flower_geo.site.work
from flower_geo.data import data_spec, load_tokenizer, prepare
from flower_geo.site.tasks.pretrain import workbench
from flower_geo.site.identity import cache_folder
workbench(sys.argv[1], 0, "builtin", 128, "cpu")
prepare(data_spec("builtin", {}, 0, 2), load_tokenizer(), seq_len=128, cache_dir=cache_folder({}))
print(json.dumps(time.time()))
"""

LOSS = """
import json, sys, torch
torch.set_num_threads(1)
from transformers import AutoModelForCausalLM
from flower_geo.data import data_spec, load_tokenizer, prepare
from flower_geo.site.identity import cache_folder
from flower_geo.training import evaluate
model, sites = AutoModelForCausalLM.from_pretrained(sys.argv[1]), 4
corpora = [prepare(data_spec("builtin", {}, i, sites), load_tokenizer(), seq_len=128,
                   cache_dir=cache_folder({})) for i in range(sites)]
found = [evaluate(model, c.held_out, 8, max_tokens=int(sys.argv[2])) for c in corpora]
print(json.dumps(sum(l.loss_sum for l in found) / sum(l.tokens for l in found)))
"""


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    kill_rounds: int = 4
    kill_steps: int = 120
    snapshot_steps: int = 25
    dying_rounds: int = 3
    dying_steps: int = 360
    warm_rounds: int = 6
    warm_steps: int = 20


QUICK = Sizes(
    kill_rounds=2, kill_steps=50, snapshot_steps=20, dying_rounds=2, dying_steps=20,
    warm_rounds=3, warm_steps=5,
)  # fmt: skip


# -- a worker dies ---------------------------------------------------------------


@dataclass
class Kill:
    """One kill of a worker, and how its site went on.

    Attributes:
        step: the step just done.
        at: Unix time.
        logged: letters in the workers' log by then.
        after: the step it went on after.
        seconds: until the next step was done.
        loading: of these, from the new process's first word until it trained.
    """

    site: int
    round: int
    step: int
    at: float
    logged: int
    after: int = 0
    seconds: float = 0.0
    loading: float = 0.0


def worker_kills(sizes: Sizes) -> list[Kill]:
    """Kill the worker of both sites once in each round but the first."""
    rng, kills = random.Random(1), list[Kill]()
    values = SETTINGS | {
        "rounds": sizes.kill_rounds, "inner-steps": sizes.kill_steps,
        "snapshot-steps": sizes.snapshot_steps,
    }  # fmt: skip
    with deployed(2) as deployment:
        deployment.submit("kills", values)
        for round in range(2, sizes.kill_rounds + 1):
            # Later than the first snapshot, and with time to go on in the round.
            chosen = {
                site: rng.randint(sizes.snapshot_steps + 1, sizes.kill_steps - 10)
                for site in (0, 1)
            }
            kills += _kill_in_round(deployment, round, chosen)
        deployment.finish()
    return kills


def _kill_in_round(deployment: Deployment, round: int, chosen: dict[int, int]) -> list[Kill]:
    done, open = list[Kill](), dict[int, Kill]()
    while (chosen or open) and deployment.goes_on():
        for site, step in list(chosen.items()):
            beats = deployment.beats(site, 0.0, round)
            if beats and beats[-1]["step"] >= step:
                logged, at = len(deployment.worker_log(site)), deployment.kill_worker(site)
                open[site] = Kill(site, round, beats[-1]["step"], at, logged)
                del chosen[site]
        for site, kill in list(open.items()):
            # The dead one's last words are read a moment after its death.
            if beats := deployment.beats(site, kill.at + 0.5, round):
                new = deployment.worker_log(site)[kill.logged :]
                went_on = re.findall(rf"goes on in round {round} after step (\d+)", new)
                kill.after = int(went_on[-1]) if went_on else 0
                kill.seconds = beats[0]["time"] - kill.at
                kill.loading = _moment(new, "training") - _moment(new, "worker at")
                done.append(kill)
                del open[site]
        time.sleep(0.02)
    return done


def _moment(log: str, word: str) -> float:
    """Unix time of the first line that begins with a word."""
    found = re.findall(rf"^(\S+ \S+),(\d+) \d+ {word}", log, re.MULTILINE)
    moment, milliseconds = found[0]
    return time.mktime(time.strptime(moment, "%Y-%m-%d %H:%M:%S")) + int(milliseconds) / 1000


def load_seconds(times: int = 3) -> float:
    """What a process takes to load libraries, model and data where nothing else is at work."""
    found = []
    for _ in range(times):
        began = time.time()
        found.append(float(run_python(LOAD, SETTINGS["model"])) - began)
    return median(found)


# -- a site dies in each round ---------------------------------------------------


def four_sites(sizes: Sizes, keep: Path, *, dying: bool) -> dict[str, Any]:
    """One run of four sites; its seconds, its replies and its final loss."""
    values = SETTINGS | PATIENT | {
        "rounds": sizes.dying_rounds, "inner-steps": sizes.dying_steps,
    }  # fmt: skip
    killed: list[int] = []
    with deployed(4) as deployment:
        deployment.submit("four", values)
        if dying:
            rng = random.Random(2)
            for round in range(1, sizes.dying_rounds + 1):
                killed += _kill_a_site(deployment, round, killed, rng, sizes.dying_steps)
        deployment.finish()
        rounds = deployment.events("round")
        sites, end = deployment.events("sites")[0], deployment.events("end")[-1]
        late = [e for e in deployment.events("site") if e["status"] == "accepted"]
        shutil.copytree(deployment.run_folder / "model", keep)
    return {
        "seconds": rounds[-1]["time"] - sites["time"], "whole": end["time"] - sites["time"],
        "rounds": [event["seconds"] for event in rounds],
        "accepted": [event["accepted"] for event in rounds],
        "late": sum(bool(event.get("staleness")) for event in late), "killed": killed,
        "loss": float(run_python(LOSS, str(keep), str(EVAL_TOKENS))),
    }  # fmt: skip


def _kill_a_site(
    deployment: Deployment, round: int, before: list[int], rng: random.Random, steps: int
) -> list[int]:
    """Kill, in the middle of a round, the one at work in it that was spared longest."""
    step, sites = rng.randint(steps // 5, steps * 4 // 5), range(4)
    while deployment.goes_on() and len(deployment.events("round")) < round:
        ready = [s for s in sites if any(b["step"] >= step for b in deployment.beats(s, 0, round))]
        if ready:
            last = {site: before[::-1].index(site) if site in before else 99 for site in ready}
            site = max(ready, key=lambda each: (last[each], -each))
            deployment.kill_site(site)
            while deployment.goes_on() and len(deployment.events("round")) < round:
                time.sleep(0.1)
            return [site]
        time.sleep(0.1)
    return []


# -- outside training ------------------------------------------------------------


def outside_training(sizes: Sizes) -> dict[str, float]:
    """Seconds a round takes beside a site's steps, medians over the rounds after the second."""
    values = SETTINGS | {"rounds": sizes.warm_rounds, "inner-steps": sizes.warm_steps}
    ways = {0: "process", 1: "in-process"}
    with deployed(2, {site: {"worker": way} for site, way in ways.items()}) as deployment:
        deployment.submit("warm", values)
        deployment.finish()
        rounds = {event["round"]: event for event in deployment.events("round")}
        answers = {(e["round"], e["site"]): e for e in deployment.events("site")}
    found: dict[str, list[float]] = {way: [] for way in ways.values()}
    # The first rounds start the worker and evaluate, the last one is no round like the others.
    for number in range(3 if len(rounds) > 3 else 2, len(rounds) + 1):
        began, last = rounds[number - 1]["time"], max(
            answers[number, f"site-{site}"]["time"] for site in ways
        )  # fmt: skip
        for site, way in ways.items():
            answer = answers[number, f"site-{site}"]
            rest = rounds[number]["time"] - last  # fold and commit, the same for both
            found[way].append(answer["time"] - began - answer["seconds"] + rest)
    return {way: median(seconds) for way, seconds in found.items()}


# -- the page --------------------------------------------------------------------


def main(quick: bool = False) -> dict[str, Any]:
    """Measure and publish."""
    sizes, began = QUICK if quick else Sizes(), time.monotonic()
    warm = outside_training(sizes)
    print("outside training", warm, flush=True)
    kills, load = worker_kills(sizes), load_seconds()
    print("worker kills", kills, load, flush=True)
    figures = {
        "steps_lost": [kill.step - kill.after for kill in kills],
        "snapshot_steps": sizes.snapshot_steps, "seconds_to_go_on": [k.seconds for k in kills],
        "seconds_loading": [kill.loading for kill in kills], "seconds_load_apart": load,
        "outside": warm, **with_deaths(sizes), "quick": quick,
        "minutes": (time.monotonic() - began) / 60,
    }  # fmt: skip
    name = "faults-quick" if quick else "faults"  # a trial does not take the figures' place
    publish(name, "What faults cost", _text(figures, sizes), figures)
    return figures


def again(part: Callable[[Sizes], dict[str, Any]]) -> None:
    """Measure one part anew, beside what is known of the rest."""
    sizes, path = Sizes(), output_folder() / "faults.json"
    figures = json.loads(path.read_text())["figures"] | part(sizes)
    publish("faults", "What faults cost", _text(figures, sizes), figures)


def with_deaths(sizes: Sizes) -> dict[str, Any]:
    """The four sites undisturbed and dying, one run after the other."""
    with tempfile.TemporaryDirectory() as folder:
        calm = four_sites(sizes, Path(folder) / "calm", dying=False)
        print("undisturbed", calm, flush=True)
        dying = four_sites(sizes, Path(folder) / "dying", dying=True)
        print("a site dies in each round", dying, flush=True)
    return {
        "calm": calm, "dying": dying, "wall_ratio": dying["seconds"] / calm["seconds"],
        "loss_difference": dying["loss"] / calm["loss"] - 1,
    }  # fmt: skip


def _text(figures: dict[str, Any], sizes: Sizes) -> str:
    lost, seconds, loading = (
        figures["steps_lost"], figures["seconds_to_go_on"], figures["seconds_loading"],
    )  # fmt: skip
    beyond = [whole - part for whole, part in zip(seconds, loading, strict=True)]
    calm, dying, outside = figures["calm"], figures["dying"], figures["outside"]
    rows = [
        [f"steps lost, of {len(lost)} kills", f"{median(lost):g}", max(lost),
         f"at most {sizes.snapshot_steps}"],
        ["seconds until the next step was done", median(seconds), max(seconds), ""],
        ["of these, loading libraries, model and data", median(loading), max(loading), ""],
        ["beyond loading", median(beyond), max(beyond), "at most 5"],
        ["loading in a process by itself", figures["seconds_load_apart"], "", ""],
    ]  # fmt: skip
    both = [
        [name, len(run["killed"]), run["seconds"], median(run["rounds"]),
         " ".join(str(count) for count in run["accepted"]), run["late"], run["whole"], run["loss"]]
        for name, run in (("undisturbed", calm), ("one site dies in each round", dying))
    ]  # fmt: skip
    values = " ".join(f"{key}={value}" for key, value in PATIENT.items())
    return "\n\n".join(
        [
            f"gpt2-nano with 1024 tokens a step on real processes of one machine, each site tied "
            f"to a core. A worker killed with -9 within a round of {sizes.kill_steps} steps, "
            f"snapshot-steps={sizes.snapshot_steps}:",
            table(["a worker is killed", "median", "most", "wanted"], rows),
            f"Four sites, {sizes.dying_rounds} rounds of {sizes.dying_steps} steps, {values}; in "
            "each round another site loses SuperNode, ClientApp and worker and is started again "
            "at once. Seconds are from the greeting to the last commit; the loss is held-out, "
            "over all four corpora:",
            table(
                ["run", "sites killed", "seconds", "a round, median", "replies folded by round",
                 "of these late", "seconds with the last evaluation", "loss"],
                both,
            ),
            f"Wall time: {figures['wall_ratio']:.3f} of the undisturbed run (at most 1.15 "
            f"wanted); final loss: {100 * figures['loss_difference']:+.2f} % (within 2 wanted).",
            f"Outside training, two sites of one run, {sizes.warm_steps} steps a round, medians:",
            table(
                ["a site trains in", "seconds a round beside the steps", "wanted"],
                [["a worker that outlives messages", outside["process"], "at most 8"],
                 ["the ClientApp's own process", outside["in-process"], ""]],
            ),
        ]
    )  # fmt: skip


if __name__ == "__main__":
    if "--outside" in sys.argv:
        again(lambda sizes: {"outside": outside_training(sizes)})
    elif "--dying" in sys.argv:
        again(with_deaths)
    else:
        main("--quick" in sys.argv)
