"""Tokenised conversations on disk: one safetensors file and a sealed description a source.

CACHE/
  KEY/                    KEY hashes all that decides the tokens
    tokens.safetensors    per split: ids, trained, offsets; prompts and answers held out
    meta.json             its sha256, the report, sealed
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from flower_geo.data.cache import kept
from flower_geo.data.instructions.corpus import Answer, Examples, Report
from flower_geo.durable import read_sealed, read_tensors, write_sealed, write_tensors
from flower_geo.errors import CheckpointCorrupt, DataError, StateError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["VERSION", "Column", "Columns", "Stored", "open_or_build"]

_LOG = logging.getLogger(__name__)

#: Raise it when the same rows would become other tokens than before.
VERSION = 1

_TOKENS, _META = "tokens.safetensors", "meta.json"


@dataclass
class Column:
    """Lists of numbers end to end, while they are gathered."""

    values: array[int]
    offsets: array[int] = field(default_factory=lambda: array("q", [0]))

    def add(self, values: list[int] | bytes) -> None:
        """Append one list."""
        self.values.extend(values)
        self.offsets.append(len(self.values))


class Columns:
    """What is gathered of a source: tokens of both splits, prompts and answers held out."""

    def __init__(self) -> None:
        self.ids = {"train": Column(array("i")), "held_out": Column(array("i"))}
        self.trained = {"train": Column(array("B")), "held_out": Column(array("B"))}
        self.prompts = Column(array("i"))
        self.answers = Column(array("B"))

    def tensors(self) -> dict[str, Tensor]:
        """The named tensors of the file: int32 ids, uint8 marks and text, int64 offsets."""
        named = {}
        for part in ("train", "held_out"):
            named[f"{part}.ids"] = _tensor(self.ids[part].values, "int32")
            named[f"{part}.trained"] = _tensor(self.trained[part].values, "uint8")
            named[f"{part}.offsets"] = _tensor(self.ids[part].offsets, "int64")
        for name, column, dtype in (
            ("prompts", self.prompts, "int32"),
            ("answers", self.answers, "uint8"),
        ):
            named[name] = _tensor(column.values, dtype)
            named[f"{name}.offsets"] = _tensor(column.offsets, "int64")
        return named


@dataclass(frozen=True)
class Stored:
    """An opened entry: a whole source, memory-mapped.

    Attributes:
        train: conversations trained on.
        held_out: conversations held out.
        report: what became of the rows.
        sha256: hex digest of the file of tokens.
    """

    train: Examples
    held_out: Examples
    report: Report
    sha256: str
    _tensors: Mapping[str, Tensor]

    def answers(self, shard: int, n_shards: int) -> list[Answer]:
        """The shard-th of n consecutive pieces of the held-out questions."""
        count = self._tensors["prompts.offsets"].numel() - 1
        return [
            Answer(
                self._cut("prompts", at).long(), bytes(self._cut("answers", at).tolist()).decode()
            )
            for at in range(shard * count // n_shards, (shard + 1) * count // n_shards)
        ]

    def _cut(self, name: str, at: int) -> Tensor:
        start, end = self._tensors[f"{name}.offsets"][at : at + 2].tolist()
        return self._tensors[name][start:end]


def open_or_build(cache_dir: Path, key: str, build: Callable[[], tuple[Columns, Report]]) -> Stored:
    """Open entry `key`, building it when it is missing or damaged.

    Args:
        cache_dir: folder of all entries; made when missing, for this user only.
        key: file-name-safe name of the entry.
        build: gives the `Columns` and the `Report`; called at most once.

    Raises:
        DataError: the folder cannot be written, or what `build` raises.
    """

    def fill(folder: Path) -> None:
        columns, report = build()
        try:
            sha256 = write_tensors(folder / _TOKENS, columns.tensors())
            write_sealed(
                folder / _META,
                {"version": VERSION, "sha256": sha256, "report": report.as_dict()},
            )
        except (StateError, SafetensorError) as error:
            raise DataError(
                f"cannot write the data cache {cache_dir}: {error}; free space there or choose a "
                "writable folder"
            ) from error

    return kept(cache_dir, key, _open, fill)


def _open(entry: Path) -> Stored | None:
    """The entry, or None when it is not there or not whole."""
    if not entry.exists():
        return None
    try:
        meta = read_sealed(entry / _META)
        if meta["version"] != VERSION:
            raise CheckpointCorrupt(f"{entry} is of version {meta['version']}")
        tensors = read_tensors(entry / _TOKENS, meta["sha256"])
        train, held_out = (
            Examples(*(tensors[f"{part}.{name}"] for name in ("ids", "trained", "offsets")))
            for part in ("train", "held_out")
        )
        return Stored(train, held_out, Report(**meta["report"]), meta["sha256"], tensors)
    except (CheckpointCorrupt, KeyError, TypeError) as error:
        _LOG.warning("data cache %s is damaged (%s): building it anew", entry, error)
        return None


def _tensor(values: array[int], dtype: str) -> Tensor:
    import numpy as np
    import torch

    # Copied: a tensor of nothing has no memory to lie over, and arrays may move theirs.
    return torch.from_numpy(np.array(values, dtype=dtype))
