"""Commands of ``flower-geo`` for split learning: what leaks, and when it pays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from flower_geo.errors import ConfigError

__all__ = ["leak_check", "plan_split"]

Model = Annotated[str, typer.Option(help="Named shape, local folder, GGUF file or hub name.")]


def leak_check(
    model: Model,
    data: Annotated[str, typer.Option(help="The site's text: a data spec, see README.")],
    cut: Annotated[str, typer.Option(help="Layers at the site, several by commas.")] = "0,1",
    noise: Annotated[
        str, typer.Option(help="Noise relative to each token's RMS, several by commas.")
    ] = "0,0.1,0.5",
    codec: Annotated[str, typer.Option(help="Codec of the activations.")] = "fp32",
    adapter: Annotated[
        str, typer.Option(help="Folder with the site's LoRA adapter.", show_default=False)
    ] = "",
    knows_adapter: Annotated[
        bool, typer.Option("--knows-adapter", help="The attacker has the adapter too.")
    ] = False,
    tokenizer: Annotated[
        str, typer.Option(help="'builtin', a folder or hub name; without: the model's.",
                          show_default=False),
    ] = "",
    public: Annotated[
        str, typer.Option(help="Text the attacker learns from; without: a shipped corpus.",
                          show_default=False),
    ] = "",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens to attack.")] = 256,
    length: Annotated[int, typer.Option(min=2, help="Tokens a row.")] = 32,
    replay: Annotated[
        bool, typer.Option("--replay/--no-replay", help="The strongest attack, and the slowest.")
    ] = True,
    candidates: Annotated[
        int, typer.Option(min=1, help="Tokens the replay tries at each place.")
    ] = 4096,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the figures there too.",
                                  show_default=False),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
) -> None:  # fmt: skip
    """Measure how much of a site's text comes back from the activations it would send.

    Four attacks with nothing but the public model: the nearest embedding, a dictionary
    of activations, a linear map learned on public text, and the replay of candidates
    in context. All are lower bounds.
    """
    from flower_geo.launch.leak import (
        HEADS,
        LeakOptions,
        check_leak,
        leak_rows,
        risk,
        write_report,
    )

    _check_codec("--codec", codec)
    cuts = [_whole("--cut", part) for part in _parts("--cut", cut)]
    noises = [_real("--noise", part) for part in _parts("--noise", noise)]
    report = check_leak(
        LeakOptions(
            model, data, cuts, noises, codec, adapter, knows_adapter, tokenizer, public, tokens,
            length, replay, candidates, seed,
        )
    )  # fmt: skip
    if json_file is not None:
        write_report(report, json_file)
    tried = report.leaks[0].tokens
    title = f"{model}, {tried} tokens of {data}, sent as {report.codec}: share of tokens recovered"
    rows = leak_rows(report)
    _show(title, HEADS, rows, markdown)
    if report.random_weights:
        typer.echo("The weights are random; give a trained model for figures that mean something.")
    typer.echo(risk(report))


def plan_split(
    model: Model,
    cut_bottom: Annotated[int, typer.Option(help="Layers at the site below the cloud's.")] = 1,
    cut_top: Annotated[int, typer.Option(help="Layers at the site above; 0: no U-shape.")] = 0,
    seq_len: Annotated[int, typer.Option(help="Tokens a sequence.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Sequences a micro-batch.")] = 8,
    micro_batches: Annotated[int, typer.Option(help="Micro-batches a step.")] = 8,
    in_flight: Annotated[
        int, typer.Option(help="Micro-batches on the way at most; 0: all of a step.")
    ] = 0,
    codec_activations: Annotated[str, typer.Option(help="Codec.")] = "int8(block=64)",
    codec_gradients: Annotated[str, typer.Option(help="Codec.")] = "int8(block=64)",
    rank: Annotated[int, typer.Option(help="Of the LoRA adapter.")] = 16,
    rtt_ms: Annotated[float, typer.Option(help="Round trip.")] = 50.0,
    mbit: Annotated[float, typer.Option(help="Line, both ways, in Mbit/s.")] = 100.0,
    site_gflops: Annotated[
        float, typer.Option(help="Speed of training at the site; 0: measure this machine.")
    ] = 0.0,
    cloud_gflops: Annotated[
        float, typer.Option(help="Speed of training in the cloud; 0: as the site.")
    ] = 0.0,
    site_memory: Annotated[float, typer.Option(help="GB the site has; 0: not said.")] = 0.0,
    table: Annotated[bool, typer.Option("--table", help="Several lines beside this one.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Tables as Markdown.")] = False,
) -> None:
    """Estimate when it pays to train split between a site and a cloud.

    Time, memory and bytes of a step beside those of the whole model with LoRA at the
    site. No weights are loaded; what a codec makes of activations is measured.
    """
    from flower_geo.launch.plan_table import (
        HEADS,
        LINES,
        PlanOptions,
        facts,
        line_rows,
        plan,
        verdict,
    )

    _check_codec("--codec-activations", codec_activations)
    _check_codec("--codec-gradients", codec_gradients)
    planned = plan(
        PlanOptions(
            model, cut_bottom, cut_top, seq_len, batch_size, micro_batches, in_flight,
            codec_activations, codec_gradients, rank, site_gflops, cloud_gflops,
            int(site_memory * 1e9),
        )
    )  # fmt: skip
    lines = [(rtt_ms, mbit), *(line for line in LINES if table and line != (rtt_ms, mbit))]
    shape = f"{micro_batches} micro-batches of {batch_size} x {seq_len} tokens"
    title = f"{model}, layers at the site: {cut_bottom} below, {cut_top} above; {shape}"
    said = verdict(planned, rtt_ms, mbit)
    whole = ("", "split", "whole model at the site")
    _show(title, whole, facts(planned), markdown)
    typer.echo()
    _show("A step", HEADS, line_rows(planned, lines), markdown)
    typer.echo()
    typer.echo(said)


def _show(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], markdown: bool) -> None:
    from flower_geo.launch.tables import markdown_table, print_table

    if markdown:
        typer.echo(f"{title}\n\n{markdown_table(heads, rows)}", nl=False)
    else:
        print_table(title, heads, rows)


def _check_codec(name: str, spec: str) -> None:
    from flower_geo.compression import codec
    from flower_geo.errors import CodecSpecError

    try:
        codec(spec)
    except CodecSpecError as error:
        raise ConfigError(f"{name}: {error}") from None


def _parts(name: str, text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise ConfigError(f"{name} {text!r} names no value; give some by commas, such as 0,1")
    return parts


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} is no whole number; give some such as 0,1,2") from None


def _real(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} {text!r} is no number; give some such as 0,0.1") from None
