"""The ``run`` command: checks, submission and the closing words."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flower_geo.config import (
    AppSettings,
    CommonConfig,
    SplitConfig,
    load_app,
    nearest,
    parse_overrides,
)
from flower_geo.errors import (
    CodecSpecError,
    ConfigError,
    FlowerGeoError,
    ModelError,
    RunFailed,
    StateError,
)
from flower_geo.launch.connections import find_connection
from flower_geo.launch.environment import flwr_home
from flower_geo.launch.flwr_cli import FlwrCli, SuperLinkUnreachable
from flower_geo.launch.processes import last_lines
from flower_geo.launch.record import Course, Order, RunRecord, supervising
from flower_geo.launch.servers import server_at_work
from flower_geo.launch.simulation import PrivateSimulation
from flower_geo.launch.supervisor import Outcome, RunRequest, supervise
from flower_geo.observe import Progress, write_report
from flower_geo.observe.units import format_loss, format_seconds, printable

__all__ = ["RunOptions", "RunPlan", "carry_out", "execute", "plan"]

COMPLETED, FAILED, GAVE_UP, INTERRUPTED = 0, 1, 3, 130
_DEFAULT_SITES = 4


@dataclass(frozen=True)
class RunOptions:
    """What stands on the command line.

    Attributes:
        app: the app's folder.
        federation: name of a connection; empty or ``local`` for a private
            simulation.
        run_config, federation_config: ``key=value`` texts.
        sites: simulated sites; 0 for the default.
        max_restarts: submissions after failures of one and the same round.
        fresh: remove the run folder first.
        plain: lines instead of a live display.
    """

    app: str
    federation: str = ""
    run_config: Sequence[str] = ()
    federation_config: Sequence[str] = ()
    sites: int = 0
    max_restarts: int = 5
    fresh: bool = False
    plain: bool = False


@dataclass(frozen=True)
class RunPlan:
    """Checked options.

    Attributes:
        request: what to submit.
        cli: the connection; None for a private simulation.
        sites: simulated sites.
        rounds: rounds planned.
        course: how far another supervisor brought it.
    """

    request: RunRequest
    cli: FlwrCli | None
    sites: int
    rounds: int
    course: Course = field(default_factory=Course)

    def order(self) -> Order:
        """What is kept of it in the run folder, for another supervisor."""
        return Order(
            self.request.app, self.request.run_config, self.request.federation_config,
            "" if self.cli is None else self.cli.connection,
            flwr_home() if self.cli is None else self.cli.home,
            self.sites, self.rounds, self.request.max_restarts,
        )  # fmt: skip


def plan(options: RunOptions) -> RunPlan:
    """Check everything that can be checked before something is started.

    Raises:
        ConfigError: a wrong app, key, value, connection or combination.
        StateError: the run folder cannot be written, or a server is at work in it.
    """
    settings = load_app(options.app, options.run_config)
    _check_declared(settings)
    federation_config = parse_overrides(options.federation_config)
    cli, here = None, True
    if options.federation not in ("", "local"):
        home = flwr_home()
        connection = find_connection(home, options.federation)
        if not connection.simulated:
            cli = FlwrCli(connection.name, home)
            cli.check_name()
            here = connection.on_this_machine
    if cli is not None and options.sites:
        raise ConfigError(
            f"--sites is for simulations; connection '{cli.connection}' has the sites that dial in"
        )
    sites = options.sites or int(federation_config.get("num-supernodes", _DEFAULT_SITES))
    config, overrides = settings.config, dict(settings.overrides)
    if cli is None and isinstance(config, SplitConfig):
        # Sites wait for each other in the stream: all are at work at once, on few CPUs too.
        federation_config = {"init-args-num-cpus": sites} | federation_config
    if cli is None and config.min_sites > sites:
        raise ConfigError(
            f"min-sites={config.min_sites} cannot be met by {sites} simulated sites; "
            f"give --sites {config.min_sites}"
        )
    _check_meaning(config, here)
    folder = None
    if here:
        run_dir = Path(config.run_dir).expanduser().absolute()
        overrides = _with_absolute_paths(overrides) | {"run-dir": str(run_dir)}
        folder = run_dir / config.run_name
        _check_unused(folder)
        if options.fresh:
            _discard(folder)
        _check_writable(folder)
    elif options.fresh:
        raise ConfigError(
            "--fresh needs the coordinator on this machine; choose another run-name instead"
        )
    request = RunRequest(
        settings.folder, overrides, federation_config, folder,
        max_restarts=options.max_restarts, private=cli is None,
    )  # fmt: skip
    return RunPlan(request, cli, sites, config.rounds)


def _check_declared(settings: AppSettings) -> None:
    """Flower takes overrides only for keys that the app's own table has."""
    text = (settings.folder / "pyproject.toml").read_text(encoding="utf-8")
    declared = tomllib.loads(text).get("tool", {}).get("flwr", {}).get("app", {}).get("config", {})
    for key in (*settings.overrides, "run-dir"):
        if key not in declared:
            raise ConfigError(
                f"app {settings.folder.name} has no '{key}' in [tool.flwr.app.config] of its "
                f"pyproject.toml{nearest(key, declared)}; add it there with a default"
            )


def _check_meaning(config: CommonConfig, here: bool) -> None:
    """Read codecs, and where the coordinator is here the model's shape, before anything starts."""
    # Both load torch, which takes seconds; the checks above answer at once.
    from flower_geo.models import MODELS, parameter_count
    from flower_geo.strategies.links import check_codecs

    try:
        check_codecs(config)
        if here and config.model not in MODELS:
            parameter_count(config.model)
    except (CodecSpecError, ModelError) as error:
        raise ConfigError(str(error)) from None


#: Keys that may name a folder or a file; the other values they take are no such paths.
_PATH_KEYS = ("model", "tokenizer", "data", "server-data")


def _with_absolute_paths(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Paths that exist from here are made absolute: the processes work elsewhere.

    A name is meant where a path could be as well: ``model="gpt2-nano"`` is the
    shape though there be a folder of that name; write ``./gpt2-nano`` for it.
    """
    from flower_geo.models import MODELS

    resolved = dict(overrides)
    for key in _PATH_KEYS:
        value = overrides.get(key)
        if not isinstance(value, str) or value == "builtin":
            continue
        path, shard = (value[: -len("[*]")], "[*]") if value.endswith("[*]") else (value, "")
        if Path(path).expanduser().exists() and not (key == "model" and value in MODELS):
            resolved[key] = str(Path(path).expanduser().absolute()) + shard
    return resolved


def _check_unused(folder: Path) -> None:
    """Refuse a folder in which a server is at work on this machine."""
    server = server_at_work(folder)
    if server is not None:
        raise StateError(
            f"run '{folder.name}' is at work already (pid {server.pid}, {folder}); wait for it, "
            f"follow it with: flower-geo run --attach {_short(folder)}, end it, or choose "
            "another run-name"
        )


def _discard(folder: Path) -> None:
    if not folder.exists():
        return
    signs = ("config.json", "metrics.jsonl", "checkpoints", "simulation.log")
    if any(folder.iterdir()) and not any((folder / sign).exists() for sign in signs):
        raise ConfigError(
            f"--fresh would remove {folder}, which does not look like a run folder; "
            "remove it by hand or choose another run-name"
        )
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise StateError(f"cannot remove {folder}: {error.strerror or error}") from error


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise StateError(
            f"run-dir {folder.parent} cannot be used: {error.strerror or error}; "
            "set run-dir to a folder that can be written"
        ) from error


def execute(options: RunOptions, console: Console | None = None) -> int:
    """Run to the end and say how it went; return the exit code.

    Returns:
        0 completed, 1 failed for a reason of its own, 3 one round failed too
        often, 130 interrupted.

    Raises:
        FlowerGeoError: it could not be started.
    """
    began = time.monotonic()
    return carry_out(plan(options), console or Console(), began=began, plain=options.plain)


def carry_out(
    chosen: RunPlan, console: Console, *, began: float | None = None, plain: bool = False
) -> int:
    """Bring a plan to its end as :func:`execute` does; returns and raises the same.

    Args:
        chosen: the plan.
        console: where to show it.
        began: when, on the monotonic clock; now by default.
        plain: lines instead of a live display.
    """
    began = time.monotonic() if began is None else began
    progress = Progress(console, chosen.rounds, live=False if plain else None)
    folder = chosen.request.folder
    try:
        with contextlib.ExitStack() as stack:
            store: Callable[[], None] = lambda: None  # noqa: E731
            if folder is not None:
                stack.enter_context(supervising(folder))
                record = RunRecord(folder, chosen.order(), chosen.course)
                record.store()
                store = record.store
            if chosen.cli is None:
                outcome = _simulated(chosen, progress, store)
            else:
                outcome = _deployed(chosen, chosen.cli, progress, store)
    except KeyboardInterrupt:
        return INTERRUPTED
    return _closing(outcome, chosen, console, time.monotonic() - began)


def _simulated(chosen: RunPlan, progress: Progress, store: Callable[[], None]) -> Outcome:
    request, folder = chosen.request, chosen.request.folder
    assert folder is not None
    simulation = PrivateSimulation(
        chosen.sites, log=folder / "simulation.log", state=folder / "sites"
    )
    request = replace(
        request, federation_config=simulation.federation_config(request.federation_config)
    )
    try:
        progress.note(f"starting a simulation of {chosen.sites} sites; run folder {_short(folder)}")
        with simulation, progress:
            return supervise(
                request, simulation.cli, progress, renew=simulation.renew, alive=simulation.alive,
                course=chosen.course, store=store,
            )  # fmt: skip
    except KeyboardInterrupt:
        progress.note(
            f"interrupted; committed rounds stay in {_short(folder)}: "
            "run the same command again to go on"
        )
        raise


def _deployed(
    chosen: RunPlan, cli: FlwrCli, progress: Progress, store: Callable[[], None]
) -> Outcome:
    folder = chosen.request.folder
    where = f"; run folder {_short(folder)}" if folder else ""
    does = "taking up" if chosen.course.run_id else "submitting to"
    progress.note(f"{does} '{cli.connection}'{where}")
    try:
        with progress:
            return supervise(chosen.request, cli, progress, course=chosen.course, store=store)
    except KeyboardInterrupt:
        again = f"take it up again with: flower-geo run --attach {_short(folder)}" if folder else (
            f"see it with: flwr list {cli.connection}"
        )  # fmt: skip
        progress.note(
            "no longer following; the run goes on without being submitted again after a crash. "
            f"{again}; end it with: flwr stop RUN_ID {cli.connection}"
        )
        raise
    except SuperLinkUnreachable as error:
        raise RunFailed(str(error)) from None


def _closing(outcome: Outcome, chosen: RunPlan, console: Console, seconds: float) -> int:
    folder = chosen.request.folder
    if outcome.status != "completed":
        errors = Console(stderr=True)
        errors.print(Text(f"error: {printable(outcome.reason, 2000)}"), soft_wrap=True)
        log = None if folder is None else folder / "simulation.log"
        if log is not None and log.exists():
            if not outcome.end and outcome.status == "gave-up":
                errors.print(Text(last_lines(log)), soft_wrap=True)
            errors.print(Text(f"log: {_short(log)}"), soft_wrap=True)
        return GAVE_UP if outcome.status == "gave-up" else FAILED
    lines: list[tuple[str, Any]] = []
    if outcome.loss is not None:
        lines.append(("held-out loss", format_loss(outcome.loss)))
    lines.append(("model", _existing(outcome.end.get("model_dir"))))
    if folder is not None:
        lines.append(("report", _existing(_report(folder))))
        lines.append(("run folder", _short(folder)))
    if outcome.restarts:
        lines.append(("restarts", outcome.restarts))
    lines.append(("time", format_seconds(seconds)))
    sample = outcome.end.get("sample")
    if sample:
        console.print()
        console.print(Text(printable(sample, 4000), style="italic"), soft_wrap=True)
    console.print()
    for label, value in lines:
        if value is not None:
            console.print(Text(f"{label:<14} {value}"), soft_wrap=True)
    return COMPLETED


def _report(folder: Path) -> Path | None:
    report = folder / "report.html"
    if report.exists():
        return report
    try:
        return write_report(folder)
    except FlowerGeoError:
        return None


def _existing(path: object) -> str | None:
    if not isinstance(path, (str, Path)) or not Path(path).exists():
        return None
    return _short(Path(path))


def _short(path: Path) -> str:
    """The path, relative where that is shorter to read."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative
