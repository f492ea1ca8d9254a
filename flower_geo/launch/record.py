"""What a run's supervisor keeps beside the run, so that another one can take it up.

``<run folder>/supervisor.json`` says what was asked for and how far it got; it
is private, since settings may hold anything.  ``supervisor.lock`` is held by
the supervisor at work, and the kernel lets go of it when that one dies.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from flower_geo.durable import FileLock, write_json
from flower_geo.errors import ConfigError, StateError, StateLocked
from flower_geo.launch.processes import ProcessRef

__all__ = ["Course", "Order", "RunRecord", "Status", "supervising"]

_FILE = "supervisor.json"
_LOCK = "supervisor.lock"
_FORMAT = 1
_LARGEST = 1 << 20  # bytes; settings are a few thousand

Status = Literal["running", "completed", "failed", "gave-up"]


@dataclass(frozen=True)
class Order:
    """What was asked for.

    Attributes:
        app: the app's folder.
        run_config, federation_config: overrides, resolved.
        connection: name of the connection; empty for a private simulation.
        flwr_home: folder with the ``config.toml`` that holds it.
        sites: simulated sites.
        rounds: rounds planned.
        max_restarts: submissions after failures of one and the same round.
    """

    app: Path
    run_config: Mapping[str, Any]
    federation_config: Mapping[str, Any]
    connection: str
    flwr_home: Path
    sites: int
    rounds: int
    max_restarts: int


@dataclass
class Course:
    """How far it got.

    Attributes:
        run_id: Flower's id of the newest submission; empty while one is under way.
        restarts: submissions after the first one.
        failures: submissions in a row that failed in one and the same round.
        committed: newest round that was seen committed.
        offset: size of the metrics file before the newest submission.
        stamp: what the server's pid file was before it.
        server: the ServerApp, where it was seen on this machine.
        status: ``running`` until it is known how it ended.
        reason: why it ended so, in one line.
    """

    run_id: str = ""
    restarts: int = 0
    failures: int = 0
    committed: int = 0
    offset: int = 0
    stamp: tuple[int, int] | None = None
    server: ProcessRef | None = None
    status: Status = "running"
    reason: str = ""


@dataclass
class RunRecord:
    """The file in a run folder.

    Attributes:
        folder: the run folder.
        order: what was asked for.
        course: how far it got; changed in place, then :meth:`store`.
        supervisor: who wrote the file last.
    """

    folder: Path
    order: Order
    course: Course = field(default_factory=Course)
    supervisor: int = 0

    def store(self) -> None:
        """Write the file anew, in one rename, readable by its owner only.

        Raises:
            StateError: the folder cannot be written.
        """
        course = self.course
        values = {
            "format": _FORMAT,
            "supervisor": os.getpid(),
            "order": {
                **dataclasses.asdict(self.order),
                "app": str(self.order.app),
                "flwr_home": str(self.order.flwr_home),
            },
            "course": {
                **vars(course),
                "server": None if course.server is None else course.server.to_json(),
            },
        }
        write_json(self.folder / _FILE, values)

    @classmethod
    def load(cls, folder: Path) -> RunRecord:
        """Read the file.

        Raises:
            ConfigError: no supervisor was ever at work in the folder.
            StateError: the file cannot be read.
        """
        path = folder / _FILE
        try:
            with path.open("rb") as file:
                values = json.loads(file.read(_LARGEST))
            if values["format"] != _FORMAT:
                raise ValueError(f"format {values['format']!r}")
            return cls(
                folder, _order(values["order"]), _course(values["course"]),
                int(values["supervisor"]),
            )  # fmt: skip
        except FileNotFoundError:
            raise ConfigError(
                f"nobody ran '{folder.name}' with flower-geo run ({path} is not there); "
                "start it with: flower-geo run APP"
            ) from None
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            raise StateError(
                f"{path} cannot be read ({error}); give the run's command again, without --attach"
            ) from error


def _order(values: Mapping[str, Any]) -> Order:
    _check_counts(values, "sites", "rounds", "max_restarts")
    if not isinstance(values["connection"], str):
        raise ValueError("connection is no text")
    for settings in (values["run_config"], values["federation_config"]):
        if not isinstance(settings, dict):
            raise ValueError("settings are no table")
    return Order(**{**values, "app": Path(values["app"]), "flwr_home": Path(values["flwr_home"])})


def _check_counts(values: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(values[name], int) or values[name] < 0:
            raise ValueError(f"{name} is no number of 0 or more")


def _course(values: Mapping[str, Any]) -> Course:
    stamp, server = values["stamp"], values["server"]
    _check_counts(values, "restarts", "failures", "committed", "offset")
    if values["status"] not in get_args(Status):
        raise ValueError(f"status {values['status']!r}")
    return Course(
        **{
            **values,
            "stamp": None if stamp is None else (int(stamp[0]), int(stamp[1])),
            "server": None if server is None else ProcessRef.from_json(server),
        }
    )


@contextlib.contextmanager
def supervising(folder: Path) -> Iterator[None]:
    """Be the one supervisor of a run.

    Raises:
        StateLocked: another ``flower-geo run`` is at it.
        StateError: the folder cannot be used.
    """
    lock = FileLock(folder / _LOCK)
    try:
        lock.acquire(f"run '{folder.name}'")
    except StateLocked:
        raise StateLocked(
            f"another flower-geo run (pid {lock.owner()}) looks after run '{folder.name}' "
            f"({folder}); leave it to that one, or end it first"
        ) from None
    try:
        yield
    finally:
        lock.release()
