"""The probe's server: rounds of averaging that leave a run folder like a real run's.

What it is told to do comes in ``sample-prompt``, words divided by spaces:

    kill@2   the process kills itself in round 2, in its first life only
    kills@2  the same in each of its lives
    raise@0  raises before the run folder is there (as for a wrong configuration)
    fail@2   ends with a decided failure in round 2
    slow     a round takes a second longer
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

from flower_geo.observe import MetricsLog

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds that are not committed yet."""
    config = context.run_config
    asked = dict(word.partition("@")[::2] for word in str(config["sample-prompt"]).split())
    if "raise" in asked:
        raise ValueError("probe: asked to raise before the run began")
    folder = Path(str(config["run-dir"])) / str(config["run-name"])
    folder.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"round": 0, "lives": 0, "weights": [0.0, 0.0]}
    saved = folder / "config.json"
    if saved.exists():
        state = json.loads(saved.read_text())
    state["lives"] += 1
    saved.write_text(json.dumps(state))
    (folder / "server.pid").write_text(f"{os.getpid()}\n")
    rounds = int(config["rounds"])
    with MetricsLog(folder / "metrics.jsonl") as log:
        log.append(
            event="start", run=folder.name, incarnation=state["lives"], strategy="probe",
            rounds=rounds, resumed_from=state["round"],
        )  # fmt: skip
        ids = _wait_for_sites(grid, int(config["min-sites"]))
        for number in range(state["round"] + 1, rounds + 1):
            _fault(asked, number, state["lives"])
            if asked.get("fail") == str(number):
                _end(log, folder, "failed", "too few sites answered; bring them back", number - 1)
                raise RuntimeError("probe: decided failure")
            weights = _round(grid, ids, number, np.array(state["weights"]))
            if "slow" in asked:
                time.sleep(1.0)
            state.update(round=number, weights=weights.tolist())
            saved.write_text(json.dumps(state))
            log.append(event="round", round=number, accepted=len(ids), asked=len(ids))
            log.append(event="eval", round=number, site="*", loss=8.0 / (1 + number), tokens=1)
        _end(log, folder, "completed", "", rounds)


def _end(log: MetricsLog, folder: Path, status: str, reason: str, rounds: int) -> None:
    log.append(
        event="end", status=status, reason=reason, rounds=rounds, seconds=1.0,
        sample="It was a probe." if status == "completed" else "",
        model_dir=str(folder / "model"), run_dir=str(folder),
    )  # fmt: skip
    (folder / "server.pid").unlink()


def _wait_for_sites(grid: Grid, wanted: int) -> list[int]:
    deadline = time.monotonic() + 60
    while len(ids := sorted(grid.get_node_ids())) < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"probe: {len(ids)} sites of {wanted}")
        time.sleep(0.1)
    return ids[:wanted]


def _round(grid: Grid, ids: list[int], number: int, weights: np.ndarray) -> np.ndarray:
    messages = [
        Message(RecordDict({"arrays": ArrayRecord([weights])}), node, "train", group_id=str(number))
        for node in ids
    ]
    pending = set(grid.push_messages(messages))
    arrays = []
    while pending:
        for reply in grid.pull_messages(list(pending)):
            pending.discard(reply.metadata.reply_to_message_id)
            if reply.has_error():
                raise RuntimeError(f"probe: {reply.error.reason}")
            arrays.append(reply.content.array_records["arrays"].to_numpy_ndarrays()[0])
        time.sleep(0.1)
    return np.asarray(np.mean(arrays, axis=0))


def _fault(asked: dict[str, str], number: int, lives: int) -> None:
    if asked.get("kills") == str(number) or (asked.get("kill") == str(number) and lives == 1):
        os.kill(os.getpid(), signal.SIGKILL)
