"""The ``flower-geo`` command.

Only the command's own words are read at start; each command imports what it
needs when it is called, so that ``--help`` answers at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from flower_geo.errors import ConfigError, FlowerGeoError

__all__ = ["main"]

app = typer.Typer(
    name="flower-geo",
    help="Train language models across institutions, on Flower.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
cluster = typer.Typer(
    help="A real deployment on this machine: one SuperLink, several SuperNodes.",
    no_args_is_help=True,
)
app.add_typer(cluster, name="cluster")

Name = Annotated[str, typer.Option(help="Name of the cluster and of its connection.")]


@app.command()
def run(
    folder: Annotated[str, typer.Argument(metavar="APP", help="Folder of the Flower app.")],
    federation: Annotated[
        str,
        typer.Argument(
            metavar="[FEDERATION]",
            help="Connection in Flower's config.toml. Without one, or with 'local': a simulation "
            "of its own that ends with the run.",
            show_default=False,
        ),
    ] = "",
    run_config: Annotated[
        list[str] | None,
        typer.Option("--run-config", "-c", help='Settings: "key=value ..." or a .toml file.'),
    ] = None,
    federation_config: Annotated[
        list[str] | None,
        typer.Option(help='Settings of a simulation, such as "client-resources-num-gpus=0.5".'),
    ] = None,
    sites: Annotated[
        int, typer.Option(min=0, help="Simulated sites (default 4).", show_default=False)
    ] = 0,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Submit again after a crash, so often without a committed round between."
        ),
    ] = 5,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove the run folder first; else the run goes on.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of a live display.")
    ] = False,
) -> None:
    """Run an app to its end: submit it, follow it, submit it again after a crash.

    Exit codes: 0 completed, 1 failed, 2 wrong configuration, 3 crashed too often, 130 interrupted.
    """
    from flower_geo.launch.runs import RunOptions, execute

    options = RunOptions(
        folder, federation, run_config or (), federation_config or (), sites, max_restarts,
        fresh, plain,
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    raise typer.Exit(execute(options))


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    """Turn a request to end into an exception, so that what was started is stopped."""
    del frame
    raise SystemExit(128 + number)


@cluster.command("up")
def cluster_up(
    sites: Annotated[int, typer.Option(min=1, help="SuperNodes.")] = 4,
    name: Name = "geo",
    node_config: Annotated[
        list[str] | None, typer.Option(help='Node-config of all sites: "key=value ...".')
    ] = None,
    site_config: Annotated[
        list[str] | None,
        typer.Option(
            help='Node-config of one site: "NUMBER:key=value ...", for instance "0:data=a.txt".'
        ),
    ] = None,
    env: Annotated[
        list[str] | None, typer.Option(help="Environment variable of all processes: NAME=VALUE.")
    ] = None,
) -> None:
    """Start a SuperLink and SuperNodes on free loopback ports and wait until all are online."""
    from flower_geo.config import parse_overrides
    from flower_geo.launch.cluster import LocalCluster
    from flower_geo.launch.options import by_site, variables

    started = LocalCluster(
        sites, name=name, node_config=parse_overrides(node_config or ()),
        site_config=by_site(site_config or ()), env=variables(env or ()),
    ).up()  # fmt: skip
    typer.echo(
        f"cluster '{name}' is up: SuperLink {started.address}, {sites} sites online\n"
        f"logs and state   {started.folder}\n"
        f"use it           flower-geo run apps/diloco {name}\n"
        f"end it           flower-geo cluster down --name {name}"
    )


@cluster.command("down")
def cluster_down(
    name: Name = "geo",
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove logs and the sites' state as well.")
    ] = False,
) -> None:
    """Stop the cluster's processes, and only those, and remove its connection."""
    from flower_geo.launch.cluster import LocalCluster

    stopped = LocalCluster.load(name)
    stopped.down(purge=purge)
    typer.echo(
        f"cluster '{name}' is down"
        + ("" if purge else f"; logs and the sites' state stay in {stopped.folder}")
    )


@cluster.command("status")
def cluster_status(name: Name = "geo") -> None:
    """Show the cluster's processes and which sites are online; exit 1 unless all are."""
    from rich.console import Console
    from rich.table import Table

    from flower_geo.launch.cluster import LocalCluster

    shown = LocalCluster.load(name)
    table = Table("member", "pid", "port", "process", "node id", "online")
    rows = shown.status()
    for row in rows:
        table.add_row(
            row.name, str(row.pid), str(row.port), "running" if row.running else "ended",
            row.node_id, row.online,
        )  # fmt: skip
    Console().print(table)
    well = all(row.running and row.online in ("", "online") for row in rows)
    raise typer.Exit(0 if well else 1)


@app.command()
def report(
    run_: Annotated[str, typer.Argument(metavar="RUN", help="Run folder, or a name in run-dir.")],
    run_dir: Annotated[str, typer.Option(help="Where run folders lie.")] = "runs",
) -> None:
    """Write report.html of a run, finished or not, and print its path."""
    from flower_geo.observe import write_report

    folder = Path(run_).expanduser()
    if not folder.is_dir():
        folder = Path(run_dir).expanduser() / run_
    if not (folder / "metrics.jsonl").is_file():
        raise ConfigError(
            f"no run '{run_}': neither it nor {folder} is a folder with a metrics.jsonl; "
            "name a run folder, or its parent with --run-dir"
        )
    typer.echo(str(write_report(folder)))


@app.command()
def config(
    strategy: Annotated[str, typer.Option(help="Way of training.")] = "diloco",
) -> None:
    """List the keys of --run-config with their defaults."""
    from rich.console import Console

    from flower_geo.config import config_for
    from flower_geo.launch.options import key_table

    Console().print(key_table(config_for(strategy)))


@app.command()
def doctor(
    model: Annotated[
        str, typer.Option(help="Named shape, local folder or hub name.")
    ] = "gpt2-nano",
    seq_len: Annotated[int, typer.Option(min=2)] = 128,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    sites: Annotated[int, typer.Option(min=1, help="Sites on this machine.")] = 1,
    run_dir: Annotated[str, typer.Option(help="Where run folders are to lie.")] = "runs",
) -> None:
    """Look for what keeps a run from working here; exit 1 when something does."""
    from rich.console import Console

    from flower_geo.launch.doctor import examine, table

    findings = examine(model, seq_len, batch_size, sites, Path(run_dir))
    Console().print(table(findings))
    raise typer.Exit(1 if any(finding.blocks for finding in findings) else 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code.

    An error of this package is one line on standard error and exit code 1 (2
    for a wrong configuration); only other exceptions show a traceback.
    """
    try:
        app(args=None if arguments is None else list(arguments), prog_name="flower-geo")
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 1
    except FlowerGeoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
