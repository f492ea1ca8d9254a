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

from flower_geo.cli_split import leak_check, plan_split
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
app.command("leak-check")(leak_check)
app.command("plan-split")(plan_split)

Name = Annotated[str, typer.Option(help="Name of the cluster and of its connection.")]


@app.command()
def run(
    folder: Annotated[
        str, typer.Argument(metavar="APP", help="Folder of the Flower app.", show_default=False)
    ] = "",
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
        int | None, typer.Option(min=1, help="Simulated sites (default 4).", show_default=False)
    ] = None,
    max_restarts: Annotated[
        int,
        typer.Option(
            min=0, help="Submit again after a crash; give up when one round fails more often."
        ),
    ] = 5,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Remove the run folder first; else the run goes on.")
    ] = False,
    plain: Annotated[
        bool, typer.Option("--plain", help="Lines instead of a live display.")
    ] = False,
    attach: Annotated[
        str,
        typer.Option(
            metavar="RUN",
            help="Take up a run, by folder or name, whose 'flower-geo run' is gone.",
            show_default=False,
        ),
    ] = "",
    run_dir: Annotated[str, typer.Option(help="With --attach: where run folders lie.")] = "runs",
) -> None:
    """Run an app to its end: submit it, follow it, submit it again after a crash.

    Exit codes: 0 completed, 1 failed, 2 wrong configuration, 3 crashed too often, 130 interrupted.
    """
    if attach:
        if folder or federation or run_config or federation_config or sites or fresh:
            raise ConfigError(
                "--attach takes a run up as it was started; leave out APP and settings"
            )
        from flower_geo.launch.attach import attach as take_up

        _heed_signals()
        raise typer.Exit(take_up(attach, run_dir, plain=plain))
    if not folder:
        raise ConfigError("flower-geo run needs the folder of an app, or --attach RUN")
    from flower_geo.launch.runs import RunOptions, execute

    options = RunOptions(
        folder, federation, run_config or (), federation_config or (), sites or 0, max_restarts,
        fresh, plain,
    )  # fmt: skip
    _heed_signals()
    raise typer.Exit(execute(options))


def _heed_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)


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
    database: Annotated[
        bool, typer.Option("--database", help="The SuperLink remembers over a restart of it.")
    ] = False,
) -> None:
    """Start a SuperLink and SuperNodes on free loopback ports and wait until all are online."""
    from flower_geo.config import parse_overrides
    from flower_geo.launch.cluster import LocalCluster
    from flower_geo.launch.options import by_site, check_node_keys, variables

    common, own = parse_overrides(node_config or ()), by_site(site_config or ())
    for keys in (common, *own.values()):
        check_node_keys(keys)
    started = LocalCluster(
        sites, name=name, node_config=common, site_config=own, env=variables(env or ()),
        database=database,
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

    places = [Path(run_).expanduser(), Path(run_dir).expanduser() / run_]
    folder = next((place for place in places if (place / "metrics.jsonl").is_file()), None)
    if folder is None:
        looked = " nor in ".join(dict.fromkeys(str(place) for place in places))
        raise ConfigError(
            f"no run '{run_}': there is no metrics.jsonl in {looked}; "
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
def codec(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Weights or updates, safetensors.")],
    spec: Annotated[
        list[str] | None,
        typer.Option(
            help="Codec, such as 'int8(block=256)'; give it again for more. Without one: several.",
            show_default=False,
        ),
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="A row for each tensor, as with one --spec.")
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(help="Leave out tensors whose name does not match, such as '*.weight'."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 1,
) -> None:
    """Measure what codecs make of the tensors of a file: size, error and speed on this machine.

    The ratio is to fp32, and so are the MB of the speeds. "rel. L2" is the norm of
    what coding changed over that of the values, "worst" the largest absolute error
    of a value, both before error feedback sends later what was lost.
    """
    from flower_geo.compression import codec as read_codec
    from flower_geo.compression.measure import DEFAULT_SPECS, measure_file, total
    from flower_geo.errors import CodecSpecError
    from flower_geo.launch.tables import print_table

    try:
        codecs = [read_codec(text) for text in spec or DEFAULT_SPECS]
    except CodecSpecError as error:
        raise ConfigError(f"--spec: {error}") from None
    rows = []
    for measured in measure_file(file, codecs, only or (), threads):
        sum_ = total(measured)
        if tensors or len(codecs) == 1:
            rows += [(one.tensor if len(codecs) == 1 else f"{one.spec}  {one.tensor}", one)
                     for one in measured]  # fmt: skip
        rows.append(("all" if len(codecs) == 1 else sum_.spec, sum_))
    title = (
        f"{sum_.values:,} values in {len(measured):,} tensors, {4e-6 * sum_.values:,.2f} MB fp32"
    )
    print_table(
        title + (f", {sum_.spec}" if len(codecs) == 1 else ""),
        ("tensor" if len(codecs) == 1 else "codec", "ratio", "bits/value", "rel. L2", "worst",
         "enc MB/s", "dec MB/s"),
        [
            (name, f"{m.ratio:.2f}", f"{m.bits:.3f}", f"{m.relative_error:.3g}", f"{m.worst:.3g}",
             f"{m.encode_speed:,.0f}", f"{m.decode_speed:,.0f}")
            for name, m in rows
        ],
    )  # fmt: skip


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
