"""Tokenise documents and part them into training and held-out token files.

Which text is held out is decided by content: the parts of a document (about
8 KB each, see `flower_geo.data.parts`) are ranked by a keyed hash of their
text, and the first in that order are held out until they make up the wanted
share.  So equal parts fall on one side, the choice does not depend on the
order of files, and a larger share holds out a superset.  Where whole parts are
too few, or too large to meet the share within a factor of two, the text is cut
once instead and its tail is held out.
"""

from __future__ import annotations

import hashlib
import logging
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from flower_geo.data.corpus import Tokens
from flower_geo.data.parts import cut
from flower_geo.errors import DataError

__all__ = ["Table", "chosen", "part_digest", "write_splits"]

_LOG = logging.getLogger(__name__)

#: Below this many different parts a share cannot be met by choosing among them.
FEW_PARTS = 16

#: Parts encoded in one call, and the letters after which a call is made anyway.
_BATCH_PARTS, _BATCH_LETTERS = 256, 1 << 19

Encode = Callable[[Sequence[str]], list[list[int]]]


@dataclass(frozen=True)
class Table:
    """One row a part, in reading order; every column has shape [n_parts].

    Attributes:
        document: number of the document, int64.
        digest: keyed hash of the text, uint64.
        size: bytes of UTF-8 text, int64.
        tokens: token ids, int64.
    """

    document: npt.NDArray[np.int64]
    digest: npt.NDArray[np.uint64]
    size: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.document.size)


def part_digest(text: str, seed: int) -> tuple[int, int]:
    """Rank of a part (64 bits) and its length in bytes."""
    raw = text.encode("utf-8")
    key = str(seed).encode("ascii")[:64]
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8, key=key).digest(), "little"), len(raw)


def chosen(
    digest: npt.NDArray[np.uint64],
    size: npt.NDArray[np.int64],
    share: float,
    tokens: npt.NDArray[np.int64] | None = None,
    min_tokens: int = 0,
) -> npt.NDArray[np.bool_]:
    """Which parts are held out: the first by digest that reach the share of bytes.

    Goes on past the share until `min_tokens` tokens are held out, when given.
    """
    different, rank = np.unique(digest, return_inverse=True)
    reached = np.cumsum(np.bincount(rank, weights=size, minlength=different.size))
    count = int(np.searchsorted(reached, share * float(size.sum()))) + 1
    if tokens is not None:
        held = np.cumsum(np.bincount(rank, weights=tokens, minlength=different.size))
        count = max(count, int(np.searchsorted(held, min_tokens)) + 1)
    return np.asarray(rank < count)


def write_splits(
    events: Iterable[str | None],
    encode: Encode,
    end_of_text: int,
    dtype: np.dtype[np.unsignedinteger],
    folder: Path,
    *,
    name: str,
    seq_len: int,
    n_shards: int,
    held_out: float,
    seed: int,
) -> str:
    """Write ``train.bin`` and ``held_out.bin`` into `folder`; return how they were parted.

    Memory does not grow with the text: tokens go to a scratch file first, and
    only a row a part is kept.

    Returns:
        "documents" when whole parts are held out, "tail" when the end is.

    Raises:
        DataError: there is no text, or too little for one training and one
            held-out sequence of `seq_len` tokens in each of `n_shards` shards.
    """
    scratch = folder / "all.bin"
    with scratch.open("wb") as handle:
        table = _tokenise(cut(events), encode, dtype, handle, seed)
    if not table.tokens.sum():
        raise DataError(f"{name} holds no text: every document is empty; add text")
    everything: Tokens = np.memmap(scratch, dtype=dtype, mode="r")
    least = n_shards * seq_len
    keep = np.ones(len(table), dtype=np.bool_)
    # An id after each document, which `table.tokens` does not count.
    total = everything.size + int(np.unique(table.document).size)
    if total < 2 * least:
        shards = f" in each of {n_shards} shards" if n_shards > 1 else ""
        raise DataError(
            f"{name} is too short: {total} tokens, and seq-len {seq_len} needs {2 * least} "
            f"(a training and a held-out sequence{shards}); add text or lower seq-len"
        )
    method = "tail"
    if np.unique(table.digest).size >= FEW_PARTS:
        held = chosen(table.digest, table.size, held_out, table.tokens, least)
        out = int(table.tokens[held].sum())
        # A dominant repeated part may overshoot the share by far; a cut meets it.
        if out <= 2 * max(held_out * total, least) and total - out >= 2 * least:
            method = "documents"
    train_path, held_path = folder / "train.bin", folder / "held_out.bin"
    if method == "documents":
        _write(train_path, everything, table, ~held, end_of_text)
        _write(held_path, everything, table, held, end_of_text)
    else:
        once = _first_copies(table)
        if int(table.tokens[once].sum()) >= 2 * least:
            keep = once
        elif not once.all():
            _LOG.warning(
                "%s repeats whole documents and is small: copies may lie on both sides of the "
                "held-out part; add other text",
                name,
            )
        _write(train_path, everything, table, keep, end_of_text)
        _cut_tail(train_path, held_path, dtype, held_out, least)
    del everything
    scratch.unlink()
    return method


def _tokenise(
    parts: Iterator[tuple[int, str]],
    encode: Encode,
    dtype: np.dtype[np.unsignedinteger],
    handle: BinaryIO,
    seed: int,
) -> Table:
    document, digest, size, tokens = array("q"), array("Q"), array("q"), array("q")
    batch: list[str] = []
    letters = 0

    def flush() -> None:
        nonlocal letters
        for ids in encode(batch):
            handle.write(np.asarray(ids, dtype=dtype).tobytes())
            tokens.append(len(ids))
        batch.clear()
        letters = 0

    for number, text in parts:
        rank, length = part_digest(text, seed)
        document.append(number)
        digest.append(rank)
        size.append(length)
        batch.append(text)
        letters += len(text)
        if len(batch) == _BATCH_PARTS or letters >= _BATCH_LETTERS:
            flush()
    if batch:
        flush()
    return Table(
        np.array(document, dtype=np.int64),
        np.array(digest, dtype=np.uint64),
        np.array(size, dtype=np.int64),
        np.array(tokens, dtype=np.int64),
    )


def _first_copies(table: Table) -> npt.NDArray[np.bool_]:
    """True for the parts of every document that is not a copy of an earlier one."""
    keep = np.ones(len(table), dtype=np.bool_)
    seen: set[bytes] = set()
    starts = np.flatnonzero(np.diff(table.document, prepend=-1))
    for start, end in zip(starts, [*starts[1:], len(table)], strict=True):
        content = table.digest[start:end].tobytes()
        keep[start:end] = content not in seen
        seen.add(content)
    return keep


def _write(
    path: Path,
    everything: Tokens,
    table: Table,
    keep: npt.NDArray[np.bool_],
    end_of_text: int,
) -> None:
    """Write the kept parts, an end-of-text id after each run that the text had in one piece."""
    end = np.array([end_of_text], dtype=everything.dtype).tobytes()
    offset = np.concatenate([[0], np.cumsum(table.tokens)])
    kept = np.flatnonzero(keep)
    breaks = (np.diff(kept) != 1) | (np.diff(table.document[kept]) != 0)
    first = kept[np.concatenate([[True], breaks])]
    last = kept[np.concatenate([breaks, [True]])]
    with path.open("wb") as handle:
        for start, stop in zip(offset[first], offset[last + 1], strict=True):
            handle.write(everything[start:stop].tobytes())
            handle.write(end)


def _cut_tail(
    train: Path,
    held: Path,
    dtype: np.dtype[np.unsignedinteger],
    share: float,
    least: int,
) -> None:
    """Move the end of the training file, at least `least` tokens, to the held-out file."""
    total = train.stat().st_size // dtype.itemsize
    count = min(max(math.ceil(share * total), least), total - least)
    with train.open("r+b") as handle:
        handle.seek((total - count) * dtype.itemsize)
        held.write_bytes(handle.read())
        handle.truncate((total - count) * dtype.itemsize)
