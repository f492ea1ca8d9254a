"""Where a site stands in its text: a shuffled walk that resumes to the token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from flower_geo.errors import DataError

if TYPE_CHECKING:
    import torch

    from flower_geo.data.corpus import Split

__all__ = ["BatchSource", "Cursor"]


class Cursor:
    """An endless walk over `n_sequences` sequences, freshly shuffled each epoch.

    The whole state is (seed, consumed): epoch ``consumed // n`` has a
    permutation of its own, made from (seed, epoch) alone, so resuming costs one
    permutation however far the walk has come.  Permutations are the stable
    argsort of raw Philox words; numpy promises that stream across versions,
    which it does not for ``Generator.permutation``.

    Args:
        n_sequences: number of sequences to walk over, at least 1.
        seed: any integer.
        consumed: sequences handed out before, at least 0.

    Raises:
        DataError: a value is out of range.
    """

    def __init__(self, n_sequences: int, seed: int, consumed: int = 0) -> None:
        """Start, or resume at `consumed`."""
        if n_sequences < 1:
            raise DataError(f"a cursor needs at least one sequence, got {n_sequences}: add text")
        self.n_sequences = n_sequences
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self.load_state_dict({"seed": seed, "consumed": consumed})

    @property
    def epoch(self) -> int:
        """Number of whole passes made."""
        return self.consumed // self.n_sequences

    def next_indices(self, batch: int) -> npt.NDArray[np.int64]:
        """The next `batch` sequence numbers, int64 of shape [batch].

        A batch that reaches the end of an epoch goes on in the next one's order.

        Raises:
            DataError: `batch` is less than 1.
        """
        if batch < 1:
            raise DataError(f"batch size {batch} is too small: set batch-size to 1 or more")
        out = np.empty(batch, dtype=np.int64)
        filled = 0
        while filled < batch:
            epoch, place = divmod(self.consumed, self.n_sequences)
            take = min(batch - filled, self.n_sequences - place)
            out[filled : filled + take] = self._permutation(epoch)[place : place + take]
            filled += take
            self.consumed += take
        return out

    def state_dict(self) -> dict[str, int]:
        """The state: ``{"seed", "consumed"}``, plain integers."""
        return {"seed": self.seed, "consumed": self.consumed}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a stored place.

        Raises:
            DataError: a key is missing, no integer, or negative where it must not be.
        """
        seed, consumed = _integer(state.get("seed")), _integer(state.get("consumed"))
        if seed is None or consumed is None or consumed < 0:
            raise DataError(
                f"cursor state {dict(state)!r} is not usable: it needs an integer 'seed' and a "
                "'consumed' of 0 or more; delete the site's state to start anew"
            )
        self.seed, self.consumed = seed, consumed
        self._epoch = -1

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if epoch != self._epoch:
            # SeedSequence takes no negative entropy; the sign goes in as a word of its own.
            entropy = [abs(self.seed), int(self.seed < 0), epoch]
            bits = np.random.Philox(np.random.SeedSequence(entropy))
            words = np.asarray(bits.random_raw(self.n_sequences), dtype=np.uint64)
            self._order = np.argsort(words, kind="stable").astype(np.int64, copy=False)
            self._epoch = epoch
        return self._order


class BatchSource:
    """Batches of a split in the order of a cursor.

    ``next`` is the callable an inner loop draws from; the cursor is advanced by
    it and can be stored at any time.

    Raises:
        DataError: the batch size is below 1, or the cursor walks over another
            number of sequences than the split has.
    """

    def __init__(self, split: Split, batch_size: int, cursor: Cursor) -> None:
        """Bind a split to the cursor that walks over it."""
        if batch_size < 1:
            raise DataError(f"batch size {batch_size} is too small: set batch-size to 1 or more")
        if cursor.n_sequences != len(split):
            raise DataError(
                f"the cursor walks over {cursor.n_sequences} sequences and the split has "
                f"{len(split)}: the site's data changed; delete its state or restore the data"
            )
        self.split = split
        self.batch_size = batch_size
        self.cursor = cursor

    def next(self) -> torch.Tensor:
        """The next batch: int64 token ids of shape [batch_size, seq_len]."""
        return self.split.batch(self.cursor.next_indices(self.batch_size))


def _integer(value: object) -> int | None:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return int(value) if whole else None  # type: ignore[call-overload]
