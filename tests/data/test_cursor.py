from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.data import BatchSource, Cursor, Split
from flower_geo.errors import DataError


@given(
    n=st.integers(1, 40),
    seed=st.integers(-(2**70), 2**70),
    first=st.lists(st.integers(1, 50), max_size=5),
    then=st.lists(st.integers(1, 50), min_size=1, max_size=5),
)
def test_a_stored_cursor_goes_on_exactly_where_it_stopped(
    n: int, seed: int, first: list[int], then: list[int]
) -> None:
    whole = Cursor(n, seed)
    for batch in first:
        whole.next_indices(batch)
    stored = json.loads(json.dumps(whole.state_dict()))
    resumed = Cursor(n, stored["seed"], stored["consumed"])
    for batch in then:
        assert np.array_equal(whole.next_indices(batch), resumed.next_indices(batch))
    assert whole.state_dict() == resumed.state_dict()


@given(n=st.integers(1, 30), seed=st.integers(0, 9), batch=st.integers(1, 70))
def test_each_epoch_visits_every_sequence_once_whatever_the_batch(
    n: int, seed: int, batch: int
) -> None:
    cursor, one_by_one = Cursor(n, seed), Cursor(n, seed)
    epochs = 3
    seen = np.concatenate([cursor.next_indices(batch) for _ in range(-(-epochs * n // batch))])
    for epoch in range(epochs):
        assert sorted(seen[epoch * n : (epoch + 1) * n]) == list(range(n))
    assert np.array_equal(seen, [one_by_one.next_indices(1)[0] for _ in seen])


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [
        Cursor(100, seed, epoch * 100).next_indices(100) for seed in (-1, 0, 1) for epoch in (0, 1)
    ]
    for at, order in enumerate(orders):
        assert not any(np.array_equal(order, other) for other in orders[:at])


def test_the_order_is_the_one_of_earlier_versions() -> None:
    # A changed order would make a resumed run differ from an undisturbed one.
    assert Cursor(10, 7).next_indices(12).tolist() == [8, 4, 3, 6, 2, 1, 0, 5, 9, 7, 3, 6]
    assert (Cursor(10, 7, 9).epoch, Cursor(10, 7, 10).epoch) == (0, 1)


def test_resuming_far_ahead_makes_one_permutation(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    philox = np.random.Philox

    def counted(seed: np.random.SeedSequence) -> np.random.Philox:
        made.append(seed)
        return philox(seed)

    monkeypatch.setattr(np.random, "Philox", counted)
    cursor = Cursor(10, 1, consumed=10**15 + 3)
    cursor.next_indices(7)
    assert len(made) == 1
    assert cursor.epoch == 10**14 + 1


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"seed": 1},
        {"seed": 1, "consumed": -1},
        {"seed": "1", "consumed": 0},
        {"seed": 1, "consumed": 1.5},
        {"seed": True, "consumed": 0},
    ],
)
def test_an_unusable_state_is_refused_and_leaves_the_cursor_alone(state: dict[str, int]) -> None:
    cursor = Cursor(5, 3, 4)
    with pytest.raises(DataError, match="delete the site's state"):
        cursor.load_state_dict(state)
    assert cursor.state_dict() == {"seed": 3, "consumed": 4}


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(DataError, match="at least one sequence"):
        Cursor(0, 1)
    with pytest.raises(DataError, match="batch-size"):
        Cursor(1, 1).next_indices(0)


def test_batches_are_the_cursor_s_rows() -> None:
    split = Split(np.arange(103, dtype="<u2"), seq_len=10)
    source = BatchSource(split, 4, Cursor(10, 5))
    twin = Cursor(10, 5)
    for _ in range(4):  # the third batch crosses the end of the epoch
        batch = source.next()
        assert batch.dtype == torch.int64 and batch.shape == (4, 10)
        assert batch[:, 0].tolist() == (twin.next_indices(4) * 10).tolist()
    assert source.cursor.consumed == 16


def test_a_source_refuses_a_cursor_of_other_data() -> None:
    split = Split(np.arange(50, dtype="<u2"), seq_len=10)
    with pytest.raises(DataError, match="the site's data changed"):
        BatchSource(split, 4, Cursor(6, 5))
    with pytest.raises(DataError, match="batch-size"):
        BatchSource(split, 0, Cursor(5, 5))
