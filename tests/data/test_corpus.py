from __future__ import annotations

import numpy as np
import pytest
import torch

from flower_geo.data import Split
from flower_geo.errors import DataError


def test_sequences_tile_the_tokens_and_leave_the_rest() -> None:
    split = Split(np.arange(65530, 65536, dtype="<u2"), seq_len=4)
    assert len(split) == 1 and split.n_tokens == 6
    assert split[0].dtype == torch.int64
    assert split[0].tolist() == [65530, 65531, 65532, 65533]
    assert torch.equal(split[-1], split[0])
    assert [row.tolist() for row in Split(np.arange(6, dtype="<u4"), 3)] == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("index", [1, -2])
def test_a_sequence_that_is_not_there(index: int) -> None:
    with pytest.raises(IndexError, match="has 1"):
        Split(np.arange(6, dtype="<u2"), 4)[index]


def test_a_batch_out_of_range_is_refused() -> None:
    split = Split(np.arange(40, dtype="<u2"), 4)
    assert split.batch([]).shape == (0, 4)
    assert split.batch(np.array([9, 0])).tolist() == [[36, 37, 38, 39], [0, 1, 2, 3]]
    for bad in ([10], [-1, 3]):
        with pytest.raises(DataError, match="split that has 10"):
            split.batch(bad)
