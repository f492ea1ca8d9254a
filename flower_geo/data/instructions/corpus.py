"""Tokenised conversations: examples one by one, packed rows, and what became of the rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "IGNORED",
    "Answer",
    "Example",
    "Examples",
    "InstructionCorpus",
    "Packed",
    "Report",
    "pack",
]

#: Label of a token that is not trained on, as PyTorch's cross-entropy has it.
IGNORED = -100


@dataclass(frozen=True)
class Example:
    """One row of a batch.

    Attributes:
        input_ids: LongTensor [n].
        labels: LongTensor [n], unshifted: the id where it is trained on, else -100.
            The first label of each conversation is -100, as nothing predicts it,
            so labels that are not -100 are exactly the tokens that count.
        position_ids: LongTensor [n] that restarts at 0 with each conversation of a
            packed row; None for a row that is one conversation.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None


@dataclass(frozen=True)
class Answer:
    """A held-out question with its short answer.

    Attributes:
        prompt_ids: LongTensor [n], up to where the assistant speaks.
        answer: the answer's text, without blanks around it.
    """

    prompt_ids: Tensor
    answer: str


@dataclass(frozen=True)
class Report:
    """What became of the rows of a whole source, before it is cut into shards.

    Attributes:
        rows: rows read.
        kept: rows trained on or held out.
        train: of these, trained on.
        held_out: of these, held out.
        truncated: kept rows that lost their end.
        dropped: reason -> rows left out.
        lengths: tokens a row before truncation: "p50", "p90" and "max", of all rows
            that became tokens.
        tokens: tokens of the kept rows.
        trained_tokens: tokens that count in the loss, of both parts.
    """

    rows: int
    kept: int
    train: int
    held_out: int
    truncated: int
    dropped: Mapping[str, int]
    lengths: Mapping[str, int]
    tokens: int
    trained_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line for a log."""
        parts = [
            f"{self.rows} rows",
            f"{self.train} to train on",
            f"{self.held_out} held out",
            "tokens a row p50 {p50} p90 {p90} max {max}".format(**self.lengths),
        ]
        if self.truncated:
            parts.append(f"{self.truncated} truncated")
        parts += [f"{count} dropped ({reason})" for reason, count in self.dropped.items()]
        return ", ".join(parts)


class Examples(Sequence[Example]):
    """Conversations of one split, in the order of the source.

    Args:
        ids: int32 [tokens], memory-mapped.
        trained: uint8 [tokens], 1 where a token counts in the loss.
        offsets: int64 [n + 1], where each conversation begins.
    """

    def __init__(self, ids: Tensor, trained: Tensor, offsets: Tensor) -> None:
        self._ids = ids
        self._trained = trained
        self._offsets = offsets

    def __len__(self) -> int:
        return int(self._offsets.numel()) - 1

    def __getitem__(self, index: Any) -> Any:
        """Example `index`, or a list of them for a slice.

        Raises:
            IndexError: there is no such example.
        """
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"example {index} of a split that has {len(self)}")
        start, end = self._offsets[place : place + 2].tolist()
        ids = self._ids[start:end].long()
        return Example(ids, ids.masked_fill(self._trained[start:end] == 0, IGNORED))

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each example."""
        found: list[int] = self._offsets.diff().tolist()
        return found

    @property
    def trained_tokens(self) -> int:
        """Labels that count, of all examples."""
        start, end = int(self._offsets[0]), int(self._offsets[-1])
        return int(self._trained[start:end].sum())

    def piece(self, shard: int, n_shards: int) -> Examples:
        """The shard-th of n consecutive, disjoint pieces, a view."""
        start, end = shard * len(self) // n_shards, (shard + 1) * len(self) // n_shards
        return Examples(self._ids, self._trained, self._offsets[start : end + 1])


class Packed(Sequence[Example]):
    """Conversations joined to rows of at most `seq_len` tokens, none of them cut.

    Args:
        examples: what is joined.
        seq_len: tokens a row, at least the longest example's.
    """

    def __init__(self, examples: Examples, seq_len: int) -> None:
        self._examples = examples
        self._bins = pack(examples.lengths, seq_len)

    def __len__(self) -> int:
        return len(self._bins)

    def __getitem__(self, index: Any) -> Any:
        """Row `index`, or a list of them for a slice.

        Raises:
            IndexError: there is no such row.
        """
        if isinstance(index, slice):
            return [self[at] for at in range(*index.indices(len(self)))]
        import torch

        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"row {index} of a split that has {len(self)}")
        parts: list[Example] = [self._examples[at] for at in self._bins[place]]
        return Example(
            torch.cat([part.input_ids for part in parts]),
            torch.cat([part.labels for part in parts]),
            torch.cat([torch.arange(part.input_ids.numel()) for part in parts]),
        )

    def __iter__(self) -> Iterator[Example]:
        return (self[index] for index in range(len(self)))

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        lengths = self._examples.lengths
        return [sum(lengths[at] for at in row) for row in self._bins]

    @property
    def trained_tokens(self) -> int:
        """Labels that count, of all rows."""
        return self._examples.trained_tokens


@dataclass(frozen=True)
class InstructionCorpus:
    """A site's conversations, tokenised and parted.

    Attributes:
        name: short name for logs and reports, shard included.
        train: what is trained on; packed rows where packing was asked for.
        held_out: what is never trained on, one conversation an example.
        held_out_answers: the held-out questions that have a short answer.
        fingerprint: hex sha256 over the tokens and labels of the whole source, the
            shard, the packing, the tokenizer and the chat template.
        report: what became of the rows of the whole source.
    """

    name: str
    train: Examples | Packed
    held_out: Examples
    held_out_answers: Sequence[Answer]
    fingerprint: str
    report: Report


def pack(lengths: Sequence[int], seq_len: int) -> list[list[int]]:
    """Join examples to rows: the longest first, each to the fullest row it fits in.

    Args:
        lengths: tokens of each example, none above `seq_len`.
        seq_len: tokens a row.

    Returns:
        The examples of each row, by number and rising; rows by their first example.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}
    spaces: list[int] = []
    for at in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        place = bisect_left(spaces, lengths[at])
        if place < len(spaces):
            space = spaces[place]
            row = open_rows[space].pop()
            if not open_rows[space]:
                del open_rows[space], spaces[place]
            rows[row].append(at)
        else:
            space, row = seq_len, len(rows)
            rows.append([at])
        left = space - lengths[at]
        if left > 0:
            if left not in open_rows:
                open_rows[left] = []
                insort(spaces, left)
            open_rows[left].append(row)
    return sorted(sorted(row) for row in rows)
