from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.data.split import chosen, part_digest

PARTS = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9000)), min_size=1, max_size=60).map(
    lambda rows: {digest: size for digest, size in rows} and rows
)


def table(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Equal digests mean equal texts, so they have one size."""
    size = dict(rows)
    return (
        np.array([digest for digest, _ in rows], np.uint64),
        np.array([size[digest] for digest, _ in rows], np.int64),
    )


@given(rows=PARTS, share=st.floats(0.01, 0.99), least=st.integers(0, 20_000))
def test_the_share_is_reached_by_whole_parts_and_not_passed_needlessly(
    rows: list[tuple[int, int]], share: float, least: int
) -> None:
    digest, size = table(rows)
    tokens = size // 2
    held = chosen(digest, size, share, tokens, least)
    assert held.any()
    assert not set(digest[held]) & set(digest[~held]), "equal parts on both sides"
    assert held.all() or (size[held].sum() >= share * size.sum() and tokens[held].sum() >= least)
    last = digest[held].max()
    without = held & (digest != last)
    assert size[without].sum() < share * size.sum() or tokens[without].sum() < least


@given(rows=PARTS, share=st.floats(0.01, 0.5), order=st.randoms(use_true_random=False))
def test_the_choice_knows_no_order_and_grows_with_the_share(
    rows: list[tuple[int, int]], share: float, order: object
) -> None:
    digest, size = table(rows)
    held = chosen(digest, size, share)
    assert not (held & ~chosen(digest, size, share * 1.9)).any()
    shuffle = list(range(len(rows)))
    order.shuffle(shuffle)  # type: ignore[attr-defined]
    assert np.array_equal(chosen(digest[shuffle], size[shuffle], share), held[shuffle])


def test_a_part_s_rank_hangs_on_text_and_seed() -> None:
    assert part_digest("é", 0) == part_digest("é", 0)
    assert part_digest("é", 0)[1] == 2
    assert len({part_digest(text, seed)[0] for text in "ab" for seed in (-1, 0, 1)}) == 6
