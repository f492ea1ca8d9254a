"""Specs of instruction data: the one string that names a site's questions and answers.

    builtin:instructions              all 21 shipped categories
    builtin:instructions:NAME+NAME    some of them, such as ai+coding
    PATH                              a file, a folder or a glob of JSON Lines, JSON or Parquet
    hf:BUILDER[:CONFIG]:SPLIT         rows of anything `datasets.load_dataset` builds

Each may end in a shard, ``[i/n]``, as in `flower_geo.data.spec`.  In a run's
``data`` key "builtin" deals the categories to the partitions, so that each site
holds other categories, and ``[*]`` is the shard of the site's partition.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flower_geo.data.spec import DataSpec, data_spec, parse_spec
from flower_geo.errors import DataError

__all__ = ["CATEGORIES", "deal", "instruction_spec", "is_glob", "parse_instructions"]

#: The shipped categories and the number of pairs in each.
CATEGORIES: Mapping[str, int] = {
    "ai": 105,
    "botprofile": 19,
    "coding": 98,
    "computers": 35,
    "conversations": 106,
    "emotion": 207,
    "food": 17,
    "gossip": 19,
    "greetings": 25,
    "health": 8,
    "history": 8,
    "humor": 31,
    "literature": 45,
    "money": 30,
    "movies": 23,
    "politics": 15,
    "psychology": 64,
    "science": 28,
    "sports": 26,
    "tech_support": 10,
    "trivia": 260,
}

_BUILTIN = "builtin:instructions"
_SHARD = re.compile(r"\[\d+/\d+\]$")
#: Longest list of categories that a name spells out.
_NAMED = 3


def instruction_spec(
    config_data: str,
    node_config: Mapping[str, Any],
    partition_id: int | None,
    num_partitions: int | None,
) -> str:
    """Decide which instruction data a site trains on.

    As `flower_geo.data.spec.data_spec`, but "builtin" deals the shipped
    categories: see `deal`.

    Returns:
        A spec that `prepare_instructions` understands.

    Raises:
        DataError: as `data_spec` does, or there are more partitions than
            `deal` can serve.
    """
    chosen = node_config.get("data", config_data)
    if not isinstance(chosen, str) or chosen.strip() != "builtin":
        return data_spec(config_data, node_config, partition_id, num_partitions)
    # Its checks of the partition, and its words about them.
    data_spec(config_data, node_config, partition_id, num_partitions)
    assert partition_id is not None and num_partitions is not None
    return deal(num_partitions)[partition_id]


def deal(num_partitions: int) -> list[str]:
    """Deal the shipped categories to partitions; the same number, the same deal.

    Up to 21 partitions get whole categories, the largest first and each to the
    partition that has the fewest pairs, so that no two share one and all have
    about as much as the largest category allows.  With more partitions the
    largest categories are cut into shards.

    Returns:
        One spec a partition.

    Raises:
        DataError: a shard would hold fewer than four pairs, or there is no
            partition.
    """
    if num_partitions < 1:
        raise DataError(f"{num_partitions} partitions: set num-partitions to 1 or more")
    largest = sorted(CATEGORIES, key=lambda name: (-CATEGORIES[name], name))
    if num_partitions <= len(CATEGORIES):
        dealt: list[list[str]] = [[] for _ in range(num_partitions)]
        for name in largest:
            least = min(dealt, key=lambda names: sum(CATEGORIES[held] for held in names))
            least.append(name)
        return [f"{_BUILTIN}:{'+'.join(sorted(names))}" for names in dealt]
    cuts = dict.fromkeys(largest, 1)
    for _ in range(num_partitions - len(CATEGORIES)):
        widest = max(largest, key=lambda name: CATEGORIES[name] / cuts[name])
        cuts[widest] += 1
        if CATEGORIES[widest] < 4 * cuts[widest]:
            raise DataError(
                f"{num_partitions} partitions are too many for the {sum(CATEGORIES.values())} "
                "shipped pairs: give each site its own data"
            )
    return [
        f"{_BUILTIN}:{name}" + (f"[{shard}/{count}]" if count > 1 else "")
        for name, count in cuts.items()
        for shard in range(count)
    ]


def parse_instructions(spec: str) -> DataSpec:
    """Read a spec; nothing is opened, only paths are looked for.

    Returns:
        A `DataSpec` of kind "builtin" (``config`` holds the categories, joined
        by "+"), "path" (``source`` may be a glob) or "hf".

    Raises:
        DataError: the spec is malformed, or names what holds no instruction data.
    """
    text = spec.strip()
    if text != _BUILTIN and not text.startswith((f"{_BUILTIN}:", f"{_BUILTIN}[")):
        parsed = parse_spec(text)
        if parsed.kind == "corpus":
            raise DataError(
                f"{text} is plain text, not questions and answers: set data=builtin, "
                f"{_BUILTIN}:NAME+NAME, or a file of JSON Lines"
            )
        if parsed.kind == "path" and text.startswith("builtin:"):
            raise DataError(
                f"data spec {text!r} is malformed: write {_BUILTIN}:NAME+NAME, or builtin"
            )
        if parsed.kind == "hf" and parsed.field != "text":
            raise DataError(
                f"data spec {text!r} names the field {parsed.field!r}, but instruction data takes "
                "whole rows: leave out the last part"
            )
        return parsed
    # The path behind it only serves to read the shard in the one way there is.
    match = _SHARD.search(text)
    base = text[: match.start()] if match else text
    piece = parse_spec(f"instructions{text[len(base) :]}") if match else DataSpec("path", "")
    names = base.removeprefix(_BUILTIN).removeprefix(":")
    wanted = sorted(set(names.split("+"))) if names or base.endswith(":") else list(CATEGORIES)
    for name in wanted:
        if name not in CATEGORIES:
            near = difflib.get_close_matches(name, CATEGORIES, n=1, cutoff=0.6)
            hint = f"did you mean {near[0]}?" if near else "write names joined by '+'."
            raise DataError(
                f"unknown category {name!r} in {text!r}: {hint} The shipped ones are "
                f"{', '.join(CATEGORIES)}"
            )
    return DataSpec("builtin", _short(wanted), piece.shard, piece.n_shards, config="+".join(wanted))


def is_glob(source: str) -> bool:
    """Whether a path that is not there is meant as a pattern."""
    return any(letter in source for letter in "*?[") and not Path(source).exists()


def _short(names: list[str]) -> str:
    if len(names) == len(CATEGORIES):
        return "instructions"
    shown = "+".join(names[:_NAMED])
    return shown if len(names) <= _NAMED else f"{shown}+{len(names) - _NAMED} more"
