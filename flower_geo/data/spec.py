"""Data specs: the one string that names a site's text.

    corpus:NAME            a shipped corpus: sotu, austen, shakespeare, bible
    PATH                   a file or a folder of text, JSON Lines or Parquet
    hf:BUILDER[:CONFIG]:SPLIT[:FIELD]
                           anything `datasets.load_dataset` builds

Each may end in a shard, ``[i/n]`` with 0 <= i < n: that site takes the i-th of
n disjoint pieces, of the training part as of the held-out part.  In a run's
``data`` key ``[*]`` stands for "the shard of my partition".

An ``hf:`` spec has two parts (builder, split), three (builder, config, split) or
four (builder, config, split, field); an empty config is allowed, so
``hf:imdb::train:text`` names a field and no configuration.  For the builders
that read files (json, csv, parquet, text, arrow) the config place holds the
files, a path or a glob: ``hf:json:/data/notes/*.jsonl:train:body``.  Colons
inside brackets belong to a split (``train[:10%]``); a path with a colon in it
cannot be written here.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flower_geo.errors import DataError

__all__ = ["CORPORA", "DataSpec", "data_spec", "nearest_spec", "parse_spec"]

#: The shipped corpora, in the order in which sites receive them.
CORPORA = ("sotu", "austen", "shakespeare", "bible")

#: `datasets` builders whose configuration is a list of files.
FILE_BUILDERS = frozenset({"json", "csv", "parquet", "text", "arrow"})

_SHARD = re.compile(r"\[(\d+)/(\d+)\]$")
_SHARD_LIKE = re.compile(r"\[([^\]\[]*/[^\]\[]*|\*)\]$")


@dataclass(frozen=True)
class DataSpec:
    """A parsed spec.

    Attributes:
        kind: "corpus", "path" or "hf".
        source: corpus name, path as given, or builder name.
        shard: this site's piece, 0-based.
        n_shards: number of pieces the source is cut into.
        config: `datasets` configuration, or files for the builders that read files.
        split: `datasets` split expression.
        field: column or JSON key that holds the text.
    """

    kind: str
    source: str
    shard: int = 0
    n_shards: int = 1
    config: str | None = None
    split: str = "train"
    field: str = "text"

    @property
    def name(self) -> str:
        """A short name for logs and reports, shard included."""
        base = Path(self.source).name if self.kind == "path" else self.source
        return base if self.n_shards == 1 else f"{base}[{self.shard}/{self.n_shards}]"


def data_spec(
    config_data: str,
    node_config: Mapping[str, Any],
    partition_id: int | None,
    num_partitions: int | None,
) -> str:
    """Decide which text a site trains on.

    ``data`` in the node's own configuration wins over the run's ``data`` key.
    "builtin" hands out the shipped corpora in turn: partition p gets corpus
    p mod 4, whole when no other partition has it, else its own shard of it.
    A trailing ``[*]`` becomes the shard of this partition.

    Args:
        config_data: the run's ``data`` value.
        node_config: the node's configuration; only ``data`` is read.
        partition_id: 0-based number of this site, when it has one.
        num_partitions: number of sites the run counts on.

    Returns:
        A spec that `prepare` understands.

    Raises:
        DataError: the value is not a non-empty string, or the partition is
            needed and missing or out of range.
    """
    chosen = node_config.get("data", config_data)
    where = "node-config" if "data" in node_config else "run-config"
    if not isinstance(chosen, str) or not chosen.strip():
        raise DataError(
            f"data={chosen!r} in the {where} names no text: give a file, a folder, "
            "corpus:NAME or builtin"
        )
    chosen = chosen.strip()
    if chosen != "builtin" and not chosen.endswith("[*]"):
        return chosen
    if partition_id is None or num_partitions is None:
        raise DataError(
            f"data={chosen} in the {where} needs to know the site's partition: set "
            "partition-id and num-partitions in the node-config, or data=corpus:NAME there"
        )
    if not 0 <= partition_id < num_partitions:
        raise DataError(
            f"partition-id {partition_id} is outside 0..{num_partitions - 1}: correct "
            "partition-id or num-partitions in the node-config"
        )
    if chosen != "builtin":
        return f"{chosen[: -len('[*]')]}[{partition_id}/{num_partitions}]"
    which, shard = partition_id % len(CORPORA), partition_id // len(CORPORA)
    holders = len(range(which, num_partitions, len(CORPORA)))
    name = f"corpus:{CORPORA[which]}"
    return name if holders == 1 else f"{name}[{shard}/{holders}]"


def parse_spec(spec: str) -> DataSpec:
    """Read a spec; nothing is opened, only paths are looked for.

    Raises:
        DataError: the spec is empty or malformed, or names an unknown corpus.
    """
    text = spec.strip()
    if not text:
        raise DataError("the data spec is empty: give a file, a folder or corpus:NAME")
    if text == "builtin" or text.endswith("[*]"):
        raise DataError(
            f"data spec {text!r} depends on the site's partition: name a corpus such as "
            "corpus:sotu, or set partition-id and num-partitions"
        )
    # A file may really be called notes[1/2]; what exists is taken at its word.
    if Path(text).exists():
        return DataSpec("path", text)
    text, shard, n_shards = _split_shard(text)
    if text.startswith("corpus:"):
        return DataSpec("corpus", _corpus(text.removeprefix("corpus:")), shard, n_shards)
    if text.startswith("hf:"):
        return _hugging_face(text, shard, n_shards)
    return DataSpec("path", text, shard, n_shards)


def nearest_spec(text: str) -> str | None:
    """The shipped corpus, or "builtin", that `text` was probably meant to name."""
    name = text.lower().rsplit(":", 1)[-1]
    near = difflib.get_close_matches(name, (*CORPORA, "builtin"), n=1, cutoff=0.6)
    if not near:
        return None
    return "builtin" if near[0] == "builtin" else f"corpus:{near[0]}"


def _split_shard(text: str) -> tuple[str, int, int]:
    match = _SHARD.search(text)
    if match is None:
        if _SHARD_LIKE.search(text):
            raise DataError(
                f"data spec {text!r} ends in a malformed shard: write [i/n] with 0 <= i < n, "
                "such as [0/2]"
            )
        return text, 0, 1
    shard, n_shards = int(match[1]), int(match[2])
    if shard >= n_shards:
        raise DataError(
            f"data spec {text!r} asks for shard {shard} of {n_shards}: shards count from 0, "
            f"write [i/n] with 0 <= i < n"
        )
    base = text[: match.start()]
    if not base:
        raise DataError(f"data spec {text!r} has a shard and no source before it")
    return base, shard, n_shards


def _corpus(name: str) -> str:
    if name in CORPORA:
        return name
    near = nearest_spec(name)
    hint = f"did you mean {near}?" if near else "write corpus:NAME."
    raise DataError(f"unknown corpus {name!r}: {hint} The shipped ones are {', '.join(CORPORA)}")


def _hugging_face(text: str, shard: int, n_shards: int) -> DataSpec:
    parts = _outside_brackets(text.removeprefix("hf:"))
    if not 2 <= len(parts) <= 4 or not parts[0]:
        raise DataError(
            f"data spec {text!r} is malformed: write hf:BUILDER:SPLIT, hf:BUILDER:CONFIG:SPLIT "
            "or hf:BUILDER:CONFIG:SPLIT:FIELD (CONFIG may be empty)"
        )
    builder, *rest = parts
    config = rest.pop(0) if len(rest) > 1 else ""
    split = rest[0]
    field = rest[1] if len(rest) > 1 else "text"
    if not split or not field:
        raise DataError(f"data spec {text!r} has an empty split or field: name both")
    if builder in FILE_BUILDERS and not config:
        raise DataError(
            f"data spec {text!r} names no files: write hf:{builder}:FILES:{split}, "
            "FILES being a path or a glob"
        )
    return DataSpec("hf", builder, shard, n_shards, config or None, split, field)


def _outside_brackets(text: str) -> list[str]:
    """Split at colons that are not inside square brackets."""
    parts, depth, start = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if letter == ":" and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    return [*parts, text[start:]]
