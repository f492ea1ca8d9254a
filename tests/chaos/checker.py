"""What must be true after a run, whatever happened in it."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from flower_geo.compression import Broadcaster, content_hash, unpack
from flower_geo.config import DiLoCoConfig, parse
from flower_geo.durable import read_sealed
from flower_geo.errors import FlowerGeoError
from flower_geo.launch.processes import port_is_free
from flower_geo.observe import read_metrics
from flower_geo.resilience import Journal
from flower_geo.resilience.spool import ReplyMeta, SpooledReply
from flower_geo.strategies import DiLoCo, initial_arrays
from flower_geo.strategies.links import Links
from tests.chaos.retraining import Version, check_sites
from tests.chaos.stage import Stage

__all__ = ["Findings", "check_ended", "check_run"]

_UNFINISHED = re.compile(r"\..+\.[a-z0-9_]{8}")


@dataclass
class Findings:
    """What a check found.

    Attributes:
        problems: broken promises, in words; empty when all is well.
        repeated: commit lines of a round that was committed before; a damaged
            newest checkpoint makes the run go back one round.
        replayed: rounds whose replay gave the journal's hash.
        retrained: replies that a site, trained again without faults, sent as well.
    """

    problems: list[str] = field(default_factory=list)
    repeated: int = 0
    replayed: int = 0
    retrained: int = 0


def check_run(
    folder: Path, kept: Path, seen: bytes, nodes: Mapping[str, Mapping[str, Any]],
    *, flipped: bool = False, forgot: bool = False,
) -> Findings:  # fmt: skip
    """Journal, weights, data and residuals of a run.

    Args:
        folder: the run folder.
        kept: replies that were folded, in a folder each.
        seen: whole journal lines seen while the run went on.
        nodes: node-config by site.
        flipped: a checkpoint was damaged, so that a round may be done twice.
        forgot: a site's state was damaged, so that it may have begun it anew.
    """
    found = Findings()
    if not (folder / "journal.jsonl").read_bytes().startswith(seen):
        found.problems.append("journal lines seen during the run are not in it any more")
    try:
        entries = Journal(folder / "journal.jsonl").entries()
    except FlowerGeoError as error:
        found.problems.append(str(error))
        return found
    stored = json.loads((folder / "config.json").read_text())
    config = parse(DiLoCoConfig, stored["config"])
    commits = [entry for entry in entries if entry["what"] == "commit"]
    final = {entry["round"]: entry for entry in commits}  # a repeated round: the newest counts
    found.repeated = len(commits) - len(final)
    if found.repeated and not flipped:
        found.problems.append(f"{found.repeated} rounds stand twice in the journal")
    if sorted(final) != list(range(1, config.rounds + 1)):
        found.problems.append(f"committed rounds are {sorted(final)} of {config.rounds}")
        return found
    replies: dict[int, list[SpooledReply]] = {}
    for round, entry in final.items():
        try:
            replies[round] = [_kept(kept, line) for line in entry["replies"]]
        except (FlowerGeoError, KeyError, TypeError) as error:
            found.problems.append(f"a reply of round {round} was not kept: {error}")
            return found
    found.problems += _check_data(config, replies)
    versions = _check_replay(config, folder, final, replies, found)
    if len(versions) > config.rounds:
        problems, found.retrained = check_sites(
            config, stored["uid"], replies, versions, nodes, forgot=forgot
        )
        found.problems += problems
    ends = [e for e in read_metrics(folder / "metrics.jsonl") if e["event"] == "end"]
    if not ends or ends[-1]["status"] != "completed":
        found.problems.append("the metrics do not end with a completed run")
    return found


def _kept(kept: Path, line: dict[str, Any]) -> SpooledReply:
    for folder in sorted(kept.glob(f"{line['payload']}-*")):
        reply = SpooledReply(folder, ReplyMeta(**read_sealed(folder / "reply.json")["meta"]))
        if (reply.meta.site, reply.meta.round, reply.weight) == (
            line["site"], line["round"], line["weight"],
        ):  # fmt: skip
            return reply
    raise KeyError(line["payload"])


def _check_data(config: DiLoCoConfig, replies: dict[int, list[SpooledReply]]) -> list[str]:
    """Every site's cursor goes on from its last accepted round, by what that round trained on."""
    problems, cursor = [], dict[str, float]()
    for round in sorted(replies):
        for reply in replies[round]:
            site, metrics = reply.meta.site, reply.meta.metrics
            step = config.batch_size * config.grad_accum
            if metrics["examples"] != metrics["steps"] * step:
                problems.append(f"{site} round {round}: {metrics['examples']} sequences are not "
                                f"{metrics['steps']} steps of {step}")  # fmt: skip
            expected = cursor.get(site, 0.0) + metrics["examples"]
            if metrics["consumed"] != expected:
                problems.append(
                    f"{site} round {round}: its cursor stands at {metrics['consumed']}, "
                    f"not at {expected}"
                )
            cursor[site] = metrics["consumed"]
    return problems


def _check_replay(
    config: DiLoCoConfig, folder: Path, final: dict[int, dict[str, Any]],
    replies: dict[int, list[SpooledReply]], found: Findings,
) -> dict[int, Version]:  # fmt: skip
    """The same replies folded again give the same bits in every round; all versions in between."""
    strategy, links = DiLoCo(config), Links(config, {})
    caster = Broadcaster(links.down(0), unpack(initial_arrays(config)), window=8, own=True)
    versions: dict[int, Version] = {0: (caster.hash, caster.shadow)}
    for round in sorted(final):
        in_order = sorted(replies[round], key=lambda reply: reply.meta.site)
        master = caster.carried(config.downlink_decay)
        following = strategy.next_model(master, caster.shadow, in_order)
        caster.advance(following, codec=links.down(round), own=True)
        if content_hash(caster.master) != final[round]["hash"]:
            found.problems.append(f"the replay of round {round} gives other weights")
            return versions
        versions[round] = (caster.hash, caster.shadow)
        found.replayed += 1
    stored = load_file(folder / "model" / "model.safetensors")
    same = [name for name in stored if name in caster.master]
    if not same or any(
        stored[name].numpy().tobytes() != caster.master[name].numpy().tobytes() for name in same
    ):
        found.problems.append("the exported model is not the one that was committed last")
    return versions


def check_ended(stage: Stage) -> list[str]:
    """Nothing is left once all is over: no process, port, held lock or unfinished file."""
    problems = []
    for process in stage.leftovers():
        problems.append(f"process {process.pid} is left: {process.name()}")
        process.kill()
    problems += [
        f"port {member.port} of {member.name} is taken"
        for member in stage.cluster.members if not port_is_free(member.port)
    ]  # fmt: skip
    places = [stage.run_folder, *stage.folder.glob("cluster/site-*/state")]
    for place in places:
        for path in place.rglob("*"):
            if path.name in ("lock", "supervisor.lock") and _is_held(path):
                problems.append(f"{path.relative_to(stage.folder)} is locked")
            elif _UNFINISHED.fullmatch(path.name):
                problems.append(f"{path.relative_to(stage.folder)} is left unfinished")
    for path in (stage.folder / "tmp").iterdir():
        if path.name.startswith(("flower-geo", "fgeo")):
            problems.append(f"temporary {path.name} is left")
    if (stage.run_folder / "server.pid").exists():
        problems.append("server.pid is left")
    return problems


def _is_held(path: Path) -> bool:
    handle = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
