"""Packed text: memory-mapped token ids, read as sequences of one length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from flower_geo.errors import DataError

if TYPE_CHECKING:
    import torch

__all__ = ["PackedCorpus", "Split", "Tokens"]

#: Token ids, little-endian uint16 or uint32.
Tokens = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Split:
    """A stream of token ids seen as disjoint sequences.

    Attributes:
        tokens: memory-mapped ids of shape [n_tokens], uint16 or uint32; documents
            in order, an end-of-text id after each.
        seq_len: tokens a sequence.  Sequence i is tokens[i*seq_len:(i+1)*seq_len];
            what is left over at the end is in no sequence.
    """

    tokens: Tokens
    seq_len: int

    @property
    def n_tokens(self) -> int:
        """Number of token ids, the remainder included."""
        return int(self.tokens.size)

    def __len__(self) -> int:
        """Number of whole sequences."""
        return self.n_tokens // self.seq_len

    def __getitem__(self, index: int) -> torch.Tensor:
        """Sequence `index` as int64 ids of shape [seq_len]; negative counts from the end.

        Raises:
            IndexError: there is no such sequence.
        """
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"sequence {index} of a split that has {len(self)}")
        return self.batch([place])[0]

    def __iter__(self) -> Iterator[torch.Tensor]:
        """All sequences in order."""
        return (self[index] for index in range(len(self)))

    def batch(self, indices: npt.ArrayLike) -> torch.Tensor:
        """Sequences by number as int64 ids of shape [len(indices), seq_len].

        Raises:
            DataError: an index is out of range.
        """
        import torch

        wanted = np.asarray(indices, dtype=np.int64).reshape(-1)
        if wanted.size and not (0 <= wanted.min() and wanted.max() < len(self)):
            raise DataError(
                f"sequence {int(wanted.max())} asked of a split that has {len(self)}: "
                "the cursor belongs to other data"
            )
        whole = self.tokens[: len(self) * self.seq_len].reshape(len(self), self.seq_len)
        return torch.from_numpy(whole[wanted].astype(np.int64))


@dataclass(frozen=True)
class PackedCorpus:
    """A site's text, tokenised, parted into training and held-out text.

    Attributes:
        name: short name for logs and reports, shard included.
        train: what is trained on.
        held_out: what is never trained on.
        fingerprint: hex sha256 over the tokens of both splits of this shard's
            corpus, the shard, the sequence length and the tokenizer.
    """

    name: str
    train: Split
    held_out: Split
    fingerprint: str
