from __future__ import annotations

import math

import pytest
import torch

from flower_geo.errors import ConfigError
from flower_geo.models.split import noise_generator, noised


def test_noise_has_the_asked_size_in_each_row() -> None:
    scales = torch.tensor([1e-3, 1.0, 50.0])[:, None]
    x = torch.randn(3, 4096, generator=torch.Generator().manual_seed(1)) * scales
    added = noised(x, 0.5, noise_generator(0, "a")) - x
    share = added.square().mean(1).sqrt() / x.square().mean(1).sqrt()
    assert torch.allclose(share, torch.full((3,), 0.5), rtol=0.05)
    assert abs(float((added / scales).mean())) < 0.02


def test_rows_of_zeros_stay_zeros() -> None:
    assert not noised(torch.zeros(2, 5), 1.0, noise_generator(0)).any()


def test_equal_streams_draw_equally_and_others_do_not() -> None:
    x = torch.ones(2, 3, 8)
    first = noised(x, 0.1, noise_generator(3, "site", 1))
    assert torch.equal(first, noised(x, 0.1, noise_generator(3, "site", 1)))
    for other in (noise_generator(4, "site", 1), noise_generator(3, "site", 2)):
        assert not torch.equal(first, noised(x, 0.1, other))
    assert noise_generator(0, "ab").initial_seed() != noise_generator(0, "a", "b").initial_seed()


def test_it_goes_on_from_a_saved_state_and_leaves_the_global_one_alone() -> None:
    before, x = torch.random.get_rng_state(), torch.ones(4, 8)
    generator = noise_generator(0)
    noised(x, 0.1, generator)
    kept = generator.get_state()
    second = noised(x, 0.1, generator)
    resumed = torch.Generator()
    resumed.set_state(kept)
    assert torch.equal(second, noised(x, 0.1, resumed))
    assert torch.equal(before, torch.random.get_rng_state())


def test_without_noise_nothing_is_drawn() -> None:
    generator, x = noise_generator(0), torch.ones(2, 2)
    state = generator.get_state()
    assert noised(x, 0.0, generator) is x
    assert torch.equal(state, generator.get_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_dtype_stays_and_draws_do_not_depend_on_it(dtype: torch.dtype) -> None:
    x = torch.linspace(-1, 1, 64).view(4, 16)
    small, exact = noised(x.to(dtype), 0.2, noise_generator(7)), noised(x, 0.2, noise_generator(7))
    assert small.dtype == dtype
    assert torch.allclose(small.float(), exact, atol=0.02)


def test_the_gradient_passes_unchanged() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    out = noised(x, 0.3, noise_generator(0))
    (gradient,) = torch.autograd.grad(out, x, torch.full((2, 4), 2.0))
    assert torch.equal(gradient, torch.full((2, 4), 2.0))


@pytest.mark.parametrize("sigma", [-0.1, math.nan, math.inf, True])
def test_a_wrong_sigma_is_refused(sigma: float) -> None:
    with pytest.raises(ConfigError, match="activation noise"):
        noised(torch.ones(1, 2), sigma, noise_generator(0))
