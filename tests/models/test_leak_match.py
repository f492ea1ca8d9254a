from __future__ import annotations

import pytest
import torch

from flower_geo.models.leak_match import Ridge, pieces, top_matches


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1, 3, 50, 64])
def test_pieces_do_not_change_what_matches(size: int) -> None:
    table, queries = drawn(50, 8), drawn(7, 8, seed=1)
    unit = table / table.norm(dim=1, keepdim=True)
    expected = (queries @ unit.T).argsort(dim=1, descending=True)[:, :4]
    assert torch.equal(top_matches(queries, pieces(table, size), 4), expected)


def test_the_length_of_a_vector_does_not_count() -> None:
    table = torch.tensor([[10.0, 1.0], [0.1, 0.0]])
    assert top_matches(torch.tensor([[3.0, 0.0]]), [table], 1).tolist() == [[1]]


def test_of_equals_the_first_is_taken_and_no_more_than_there_are() -> None:
    table = torch.ones(5, 2)
    assert top_matches(torch.ones(1, 2), pieces(table, 1), 9).tolist() == [[0, 1, 2, 3, 4]]


def test_ridge_finds_a_linear_map_with_its_intercept() -> None:
    x, w = drawn(400, 6), drawn(6, 3, seed=1)
    fitted = Ridge(6)
    for part in pieces(x, 150):
        fitted.add(part, part @ w + 5)
    new = drawn(20, 6, seed=2)
    assert torch.allclose(fitted.map(new), new @ w + 5, atol=0.02)


def test_ridge_of_fewer_pairs_than_values_is_finite() -> None:
    fitted = Ridge(16)
    fitted.add(drawn(3, 16), drawn(3, 2, seed=1))
    assert fitted.map(drawn(4, 16, seed=2)).isfinite().all()
