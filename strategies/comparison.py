"""Base against local-only against federated: what tells an institution whether joining paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flower_geo.resilience import Measured

__all__ = ["WHOLE", "card_rows", "compared", "figures_named"]

#: Name of the row over all sites.
WHOLE = "*"
#: Columns, and how the sites' figures of each end.
_COLUMNS = {"base": "-base", "local": "-local", "federated": "-before"}
#: Figures that a card has another name for.
_TITLES = {"accuracy": "token accuracy"}
#: Figures, by their names in a reply, with the count each is a mean over.
_FIGURES = {"loss": "eval-tokens", "accuracy": "eval-tokens", "exact-match": "exact-asked"}


def figures_named(metrics: Mapping[str, float], ending: str = "") -> dict[str, float]:
    """Loss, accuracy and exact match with that ending, as far as they are there, for the log."""
    return {
        name.replace("-", "_"): metrics[name + ending]
        for name in _FIGURES
        if name + ending in metrics
    }


def compared(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    """One row a site and one over all; none where the sites measured no base.

    A row has ``site``, ``tokens`` and the columns ``base``, ``local`` (where the site
    trained alone) and ``federated``, each of ``loss``, ``accuracy`` and, where asked
    for, ``exact_match``.  Over all: means by tokens, or by answers asked for, of what
    every site has.
    """
    known = [each for each in measured if "loss-base" in each.metrics]
    if not known:
        return []
    rows = [
        {"site": each.site, "tokens": each.tokens, **_columns(each.metrics)} for each in known
    ]  # fmt: skip
    means: dict[str, float] = {}
    for ending in _COLUMNS.values():
        for name, count in _FIGURES.items():
            mean = _mean(known, name + ending, count if count == "eval-tokens" else count + ending)
            if mean is not None:
                means[name + ending] = mean
    whole = {"site": WHOLE, "tokens": sum(each.tokens for each in known), **_columns(means)}
    return [*rows, whole]


def card_rows(whole: Mapping[str, Any], server: Mapping[str, Any]) -> dict[str, Any]:
    """The table for a model card: over all sites and on the server set, no site by name."""
    held = (("held-out data of the sites", whole), ("server set", server))
    titles = {"base": "base", "local": "one site alone", "federated": "federated"}
    rows = [
        {
            "on": data, "model": title,
            **{_TITLES.get(name, name): value for name, value in columns[column].items()},
        }
        for data, columns in held
        for column, title in titles.items()
        if column in columns
    ]  # fmt: skip
    return {"evaluation": rows} if rows else {}


def _columns(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    found = {column: figures_named(metrics, ending) for column, ending in _COLUMNS.items()}
    return {column: figures for column, figures in found.items() if "loss" in figures}


def _mean(measured: Sequence[Measured], name: str, count: str) -> float | None:
    """Mean of a figure that all have, or None."""
    if not all(name in each.metrics for each in measured):
        return None
    counts = [each.metrics.get(count, each.tokens) for each in measured]
    total = sum(counts)
    if not total > 0:
        return None
    return sum(each.metrics[name] * n for each, n in zip(measured, counts, strict=True)) / total
