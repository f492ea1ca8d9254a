"""Takes up a run whose ``flower-geo run`` is gone: follows it, or submits it again."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from rich.console import Console

from flower_geo.errors import ConfigError
from flower_geo.launch.connections import find_connection
from flower_geo.launch.flwr_cli import FlwrCli
from flower_geo.launch.record import RunRecord, supervising
from flower_geo.launch.runs import COMPLETED, FAILED, GAVE_UP, RunPlan, carry_out
from flower_geo.launch.servers import end_server
from flower_geo.launch.supervisor import RunRequest

__all__ = ["attach", "find_run"]


def find_run(run: str, run_dir: str = "runs") -> Path:
    """Folder of a run.

    Args:
        run: a run folder, or a run's name.
        run_dir: where folders of that name lie.

    Raises:
        ConfigError: there is none.
    """
    places = [Path(run).expanduser(), Path(run_dir).expanduser() / run]
    signs = ("supervisor.json", "metrics.jsonl", "config.json")
    for place in places if run else ():
        if any((place / sign).is_file() for sign in signs):
            return place.absolute()
    looked = " nor ".join(dict.fromkeys(str(place) for place in places))
    raise ConfigError(
        f"no run '{run}': neither {looked} is a run folder; name one, or its parent with --run-dir"
    )


def attach(
    run: str, run_dir: str = "runs", *, plain: bool = False, console: Console | None = None
) -> int:
    """Bring a run to its end that another ``flower-geo run`` began; return the exit code.

    Where the run still lives it is followed; where it has died it is submitted
    again.  Restarts and failures so far count on.

    Args:
        run: a run folder, or a run's name.
        run_dir: where folders of that name lie.
        plain: lines instead of a live display.
        console: where to show it.

    Returns:
        As ``runs.execute``; for a run that is over, as it ended.

    Raises:
        ConfigError: there is no such run, or its connection is gone.
        StateLocked: another ``flower-geo run`` looks after it.
        StateError: what was kept of it cannot be read.
    """
    console, began = console or Console(), time.monotonic()
    folder = find_run(run, run_dir)
    RunRecord.load(folder)  # a folder that nobody ran gets no lock
    with supervising(folder):  # says who else is at it, before anything is decided
        record = RunRecord.load(folder)
        order, course = record.order, record.course
        if course.status != "running":
            return _over(record, console)
        private = not order.connection
        if not order.app.is_dir():
            raise ConfigError(
                f"the app of run '{folder.name}', {order.app}, is gone; restore it there"
            )
        if private or not course.run_id:
            # A private SuperLink went with its supervisor.  And a submission whose
            # answer nobody heard cannot be asked after: what it began is ended.
            if not private:
                end_server(folder, course.server)
            course.restarts += 1
            course.run_id, course.server = "", None
        cli = None
        if not private:
            cli = FlwrCli(find_connection(order.flwr_home, order.connection).name, order.flwr_home)
    request = RunRequest(
        order.app, order.run_config, order.federation_config, folder,
        max_restarts=order.max_restarts, private=private,
    )  # fmt: skip
    chosen = RunPlan(request, cli, order.sites, order.rounds, dataclasses.replace(course))
    return carry_out(chosen, console, began=began, plain=plain)


def _over(record: RunRecord, console: Console) -> int:
    course, name = record.course, record.folder.name
    if course.status == "completed":
        console.print(f"run '{name}' is finished: completed", markup=False, highlight=False)
        return COMPLETED
    console.print(
        f"run '{name}' is over ({course.status}): {course.reason}", markup=False, highlight=False
    )
    return GAVE_UP if course.status == "gave-up" else FAILED
