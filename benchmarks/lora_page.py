"""The section on federated LoRA of ``docs/figures.md``, from what the benchmark measured."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from benchmarks.figures import table

__all__ = ["page"]

AIM_BYTES, AIM_LOSS = 1 / 8, 1.0  # of Flower's traffic; per cent
_RULES = ("avg", "residual", "svd", "stack", "ffa", "alternate")
_NAMES = {
    "avg": "`avg` (FedIT)", "residual": "`residual` (FedEx-LoRA)", "svd": "`svd` (FlexLoRA)",
    "stack": "`stack` (FLoRA)", "ffa": "`ffa` (FFA-LoRA)", "alternate": "`alternate` (RoLoRA)",
}  # fmt: skip


def page(figures: Mapping[str, Any]) -> str:
    """The section as Markdown.

    Args:
        figures: ``runs`` (each a rule, ``mixed``, ``wire``, ``rounds``, ``seed``, ``course``
            of [round, bytes up, bytes down, loss], ``error``), ``steps``, ``base`` in words,
            ``deployed`` and ``real``, both None where they did not run.
    """
    parts = [_setting(figures), _rules(figures), _wires(figures["runs"])]
    if figures["deployed"] is not None:
        parts.append(_deployed(figures["deployed"]))
    if figures["real"] is not None:
        parts.append(_real(figures["real"]))
    return "\n\n".join(parts)


def _chosen(runs: Iterable[Mapping[str, Any]], **wanted: Any) -> list[Mapping[str, Any]]:
    found = [run for run in runs if all(run[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda run: int(run["seed"]))


def _loss(run: Mapping[str, Any]) -> float:
    return float(run["course"][-1][3])


def _megabytes(runs: Sequence[Mapping[str, Any]], *ways: int) -> float:
    return float(mean(sum(run["course"][-1][way] for way in ways) for run in runs) / 1e6)


def _spread(values: Sequence[float], digits: int = 3) -> str:
    middle = f"{mean(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _setting(figures: Mapping[str, Any]) -> str:
    runs = figures["runs"]
    seeds = len({run["seed"] for run in runs})
    before = next(run["course"][0][3] for run in runs if run["course"][0][0] == 0)
    return (
        f"{figures['base']} The 21 shipped categories of instructions are dealt to four sites, "
        f"so that no two share one; {figures['steps']} local steps of 4 rows a site in each run, "
        "cut into as many rounds as the row says, cosine schedule over the whole run. Losses are "
        f"held-out, a label of all four sites, from {before:.3f} before training; mean of "
        f"{seeds} seed{'s (least to most)' if seeds > 1 else ''}. Bytes are payload of all sites."
    )


def _rules(figures: Mapping[str, Any]) -> str:
    rows = []
    for rule in _RULES:
        row: list[Any] = [_NAMES[rule]]
        for mixed in (False, True):
            runs = [
                run
                for run in _chosen(figures["runs"], rule=rule, mixed=mixed, wire="safe")
                if run["rounds"] == figures["rounds"][rule]
            ]
            row += [
                runs[0]["rounds"], _megabytes(runs, 1, 2), _spread([_loss(run) for run in runs]),
                f"{100 * mean(run['error'] for run in runs):.2g}",
            ]  # fmt: skip
        rows.append(row)
    headings = ["aggregation"]
    for ranks in ("ranks 16", "ranks 4/8/16/32"):
        headings += [f"{ranks}: rounds", "MB both ways", "held-out loss", "error, %"]
    return (
        "**Rules at the same bytes and the same steps**, preset `safe` (8 bits). A rule that sends "
        "half an adapter has twice the rounds, one that folds all sites' factors into the base "
        "has fewer. With mixed ranks the run's rank is 32, and alpha over rank is 2 everywhere. "
        "The error is the round's aggregate's against the exact mean of the updates.\n\n"
        + table(headings, rows)
    )


def _wires(runs: Sequence[Mapping[str, Any]]) -> str:
    flower = _chosen(runs, rule="flower")
    base = {run["seed"]: run for run in flower}
    rows = [
        ["Flower's FedAvg", "fp32", flower[0]["rounds"], _megabytes(flower, 1),
         _megabytes(flower, 2), "1", _spread([_loss(run) for run in flower]), "-"]
    ]  # fmt: skip
    for wire in ("safe", "lean", "extreme"):
        for rule in _RULES:
            ours = [
                run for run in _chosen(runs, rule=rule, mixed=False, wire=wire)
                if run["rounds"] == flower[0]["rounds"]
            ]  # fmt: skip
            if not ours:
                continue
            share = _megabytes(ours, 1, 2) / _megabytes(flower, 1, 2)
            gaps = [100 * (_loss(run) / _loss(base[run["seed"]]) - 1) for run in ours]
            rows.append(
                [_NAMES[rule], f"`{wire}`", ours[0]["rounds"], _megabytes(ours, 1),
                 _megabytes(ours, 2), f"1/{1 / share:.1f}", _spread([_loss(run) for run in ours]),
                 _spread(gaps, 2)]
            )  # fmt: skip
    return (
        "**Against Flower's own FedAvg** of the same adapter: PEFT, a plain loop, the optimizer "
        "made anew and the learning rate lowered each round, ranks 16, fp32 both ways without its "
        "federated evaluation. The gap is to Flower's loss of the same seed; wanted are at most "
        f"1/8 of the bytes at a gap of at most {AIM_LOSS:g} %, with `lean`.\n\n"
        + table(
            ["", "wire", "rounds", "MB up", "MB down", "of Flower's bytes", "held-out loss",
             "gap, %"],
            rows,
        )
    )  # fmt: skip


def _deployed(figures: Mapping[str, Any]) -> str:
    flower, ours = figures["flower"], figures["lean"]

    def row(name: str, key: str, scale: float = 1.0) -> list[Any]:
        return [
            name, flower[key] * scale, ours[key] * scale, ours[key] / flower[key],
        ]  # fmt: skip

    rows = [
        row("payload up, MB", "up", 1e-6), row("payload down, MB", "down", 1e-6),
        row("sites' sockets up, MB", "socket_up", 1e-6),
        row("sites' sockets down, MB", "socket_down", 1e-6),
        row("seconds a round outside training", "outside"),
        row("seconds, the whole run", "seconds"), row("held-out loss", "loss"),
    ]  # fmt: skip
    for part in ("ServerApp", "ClientApp", "worker", "SuperNode", "SuperLink"):
        theirs, mine = flower["mib"].get(part), ours["mib"].get(part)
        ratio = mine / theirs if mine and theirs else "-"
        rows.append([f"peak memory of {part}, MiB", theirs or "-", mine or "-", ratio])
    payload = (ours["up"] + ours["down"]) / (flower["up"] + flower["down"])
    socket = (ours["socket_up"] + ours["socket_down"]) / (
        flower["socket_up"] + flower["socket_down"]
    )
    return (
        f"**On real processes**: one SuperLink, four SuperNodes, {figures['rounds']} rounds of "
        f"{figures['steps'] // figures['rounds']} steps, `svd` with preset `lean` and Flower's "
        "FedAvg in turn on the same cluster. Sockets are counted by a relay between the sites and "
        "the coordinator, with Flower's polling and some 0.9 kB of headers a tensor, of which "
        "this small adapter has 56. Ours also evaluates before the first round and after the last, "
        "which is in its whole run. Outside training is a round less its slowest site's steps, "
        "median.\n\n"
        + table(["", "Flower's FedAvg", "`lean`", "of Flower's"], rows)
        + f"\n\nPayload: 1/{1 / payload:.1f} of Flower's (at most 1/8 wanted); on the socket: "
        f"1/{1 / socket:.1f}. Loss: {100 * (ours['loss'] / flower['loss'] - 1):+.2f} % (at most "
        f"{AIM_LOSS:g} wanted)."
    )


def _real(figures: Mapping[str, Any]) -> str:
    together, alone = figures["together"], figures["alone"]
    rows = [
        [name, site["data"], int(site["labels"]), site["before"],
         alone["sites"][name]["after"], site["after"],
         100 * (site["after"] / alone["sites"][name]["after"] - 1)]
        for name, site in sorted(together["sites"].items())
    ]  # fmt: skip
    labels = sum(row[2] for row in rows)
    whole = [sum(row[2] * row[each] for row in rows) / labels for each in (3, 4, 5)]
    rows.append(["all", "", labels, *whole, 100 * (whole[2] / whole[1] - 1)])
    form = figures["form"]
    return (
        f"**A real model**: the first 8 layers of SmolLM2-135M-Instruct (`make smollm2`), rank "
        f"{form['rank']}, {form['rounds']} rounds of {form['inner-steps']} steps of "
        f"{form['batch-size']} rows at each of four sites, `svd` with preset `lean`: "
        f"{together['parameters'] / 1e6:.2f} M values of adapter, {together['up'] / 1e6:.2f} MB up "
        f"and {together['down'] / 1e6:.2f} MB down of all sites. Each site's held-out loss with "
        "the base, with an adapter trained alone for as many steps, and with the one trained "
        "together:\n\n"
        + table(
            ["site", "categories", "labels", "base", "alone", "together", "together to alone, %"],
            rows,
        )
    )
