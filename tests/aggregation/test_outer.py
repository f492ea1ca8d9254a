"""The outer optimiser against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch

from flower_geo.aggregation import OuterSGD


def displacements(outer: OuterSGD, gradients: list[float]) -> list[float]:
    """Step sizes for a sequence of pseudo-gradients of one weight."""
    theta, buffer, steps = torch.zeros(1), None, []
    for gradient in gradients:
        mean = theta.double() - gradient
        following, buffer = outer.step(theta, theta, mean, buffer)
        steps.append(float(theta - following))
        theta = following
    return steps


def test_nesterov_with_a_constant_gradient() -> None:
    steps = displacements(OuterSGD(0.7, 0.9), [1.0] * 3)
    assert steps == pytest.approx([1.33, 1.897, 2.4073], abs=1e-5)


def test_nesterov_step_tends_to_seven() -> None:
    assert displacements(OuterSGD(0.7, 0.9), [1.0] * 200)[-1] == pytest.approx(7.0, abs=1e-3)


def test_an_impulse_sums_to_seven_and_a_zero_gradient_still_moves() -> None:
    steps = displacements(OuterSGD(0.7, 0.9), [1.0] + [0.0] * 300)
    assert steps[:3] == pytest.approx([1.33, 0.567, 0.5103], abs=1e-5)
    assert sum(steps) == pytest.approx(7.0, abs=1e-3)


def test_agrees_with_torch_sgd_nesterov() -> None:
    torch.manual_seed(0)
    theta = torch.randn(50)
    parameter = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    outer, buffer = OuterSGD(0.7, 0.9), None
    for _ in range(10):
        gradient = torch.randn(50)
        parameter.grad = gradient.clone()
        optimizer.step()
        theta, buffer = outer.step(theta, theta, theta.double() - gradient, buffer)
    torch.testing.assert_close(theta, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_plain_momentum_agrees_with_torch() -> None:
    torch.manual_seed(0)
    theta = torch.randn(20)
    parameter = torch.nn.Parameter(theta.clone())
    optimizer = torch.optim.SGD([parameter], lr=0.5, momentum=0.8)
    outer, buffer = OuterSGD(0.5, 0.8, nesterov=False), None
    for _ in range(6):
        gradient = torch.randn(20)
        parameter.grad = gradient.clone()
        optimizer.step()
        theta, buffer = outer.step(theta, theta, theta.double() - gradient, buffer)
    torch.testing.assert_close(theta, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_lr_one_without_momentum_is_the_mean_to_the_bit() -> None:
    # Values of very different size, where theta - (theta - mean) is not mean.
    theta = torch.tensor([1.0, -3e4, 1e-30, 7.25])
    local = torch.tensor([1.1e-9, 2e-7, -4.0, 7.25])
    following, buffer = OuterSGD(1.0, 0.0).step(theta, theta, local.double(), None)
    assert buffer is None
    assert torch.equal(following, local)
    assert not torch.equal(theta - (theta - local), local)


def test_what_coding_lost_is_kept_in_the_master() -> None:
    master, base = torch.tensor([1.001]), torch.tensor([1.0])
    mean = torch.tensor([0.5], dtype=torch.float64)
    following, _ = OuterSGD(1.0, 0.0).step(master, base, mean, None)
    assert float(following) == pytest.approx(0.501, abs=1e-6)
