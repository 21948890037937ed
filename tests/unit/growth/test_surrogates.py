"""Surrogates of activations: close to them, with the derivatives that they lack."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.growth import GradMax, Measurement
from growlab.growth.measurement import IdentityNorms, right_derivatives, smooth, twice_differentiable
from growlab.widths import tensors_of
from tests.cases import Around
from tests.unit.growth.measured import started

BENT = [
    *(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(0.2), nn.Hardtanh(), nn.Hardsigmoid()),
    *(nn.Hardswish(), F.relu, F.relu6, torch.relu, Tensor.relu),
]


def points() -> Tensor:
    return torch.arange(-160.0, 161.0, dtype=torch.float64) / 20


@pytest.mark.parametrize("activation", BENT)
def test_smooth_is_close_and_has_a_second_derivative(activation) -> None:
    expected = activation(points())
    x = points().requires_grad_()
    with smooth(20.0):
        y = activation(x + 0.0)
    # softplus is off by log(2) / beta at most, at each of two corners; hardswish multiplies it by up to 3.
    assert float((y - expected).detach().abs().max()) < 0.11
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert float(second.abs().max()) > 0.5


@pytest.mark.parametrize("activation", [*BENT, F.leaky_relu, F.hardtanh])
def test_smooth_is_the_activation_itself_away_from_its_corners(activation) -> None:
    """With arguments that are given and with torch's defaults: softplus is off by exp(-beta |x|) / beta."""
    corners = torch.tensor([-3.0, -1.0, 0.0, 1.0, 3.0, 6.0], dtype=torch.float64)
    x = points()
    x = x[(x[:, None] - corners).abs().amin(1) > 0.4]
    with smooth(50.0):
        y = activation(x + 0.0)
    torch.testing.assert_close(y, activation(x + 0.0))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(0.2), F.relu6, Tensor.relu])
def test_right_derivatives_are_one_at_zero_and_nothing_else_changes(activation) -> None:
    x = points().requires_grad_()
    plain = activation(x)
    (expected,) = torch.autograd.grad(plain.sum(), x)
    with right_derivatives():
        y = activation(x)
    (slope,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y, plain)
    assert torch.equal(slope, torch.where(x == 0, 1.0, expected))


def test_a_hard_sigmoid_is_itself_and_has_a_second_derivative() -> None:
    x = points().requires_grad_()
    with twice_differentiable():
        y = F.hardsigmoid(x)
    torch.testing.assert_close(y, F.hardsigmoid(x))
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    inside, corners = x.abs() < 3, x.abs() == 3
    torch.testing.assert_close(second[~corners], torch.where(inside, 2 / 36, 0.0).double()[~corners])


def test_new_channels_pass_norms_that_are_modules_and_norms_that_are_functions() -> None:
    x, norm = torch.randn(6, 4, 3, dtype=torch.float64), nn.BatchNorm1d(4).double()
    weight, bias, mean, var = norm.weight, norm.bias, norm.running_mean, norm.running_var
    new, plain = torch.tensor([False, True, False, True]), norm(x).detach()
    with IdentityNorms(lambda mean, weight: new if weight is norm.weight else None):
        found = [
            norm(x),
            F.batch_norm(x, mean, var, weight, bias, training=True),
            F.batch_norm(x, mean, var, weight=weight, bias=bias, training=True),
        ]
        torch.testing.assert_close(F.batch_norm(x, mean, var, training=True), plain)
    for y in found:
        assert torch.equal(y[:, new], x[:, new])
        torch.testing.assert_close(y[:, ~new], plain[:, ~new])


def test_second_derivatives_through_attention_and_hard_sigmoids() -> None:
    def attentive(net: Any, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 2, 4)
        x = F.scaled_dot_product_attention(x, x, x).mean((1, 2))
        return net.last(net.first(x).tanh()) * F.hardsigmoid(x[:, :1])

    run = started(Around(attentive, first=[4, 8], last=[8, 3]), (8,), GradMax(), part=1.0)
    data = Measurement(run.network, run.graph, run.batches, F.cross_entropy)
    direction = torch.randn(8, 4, dtype=torch.float64)
    tensors = tensors_of(run.network, run.graph)
    found = data.products(tensors, {"first.weight": direction}, ["first.weight"])["first.weight"]
    step, weight = 1e-5, run.network.first.weight
    sides = [
        data.gradients({**tensors, "first.weight": weight.detach() + side * direction}, ["first.weight"])
        for side in (step, -step)
    ]
    expected = (sides[0]["first.weight"] - sides[1]["first.weight"]) / (2 * step)
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=1e-5)


def test_an_operation_without_a_second_derivative_is_named() -> None:
    network = Around(lambda net, x: net.last(torch.ops.aten.hardsigmoid(net.first(x))), first=[4, 8], last=[8, 3])
    run = started(network, (4,), GradMax(), part=1.0)
    data = Measurement(run.network, run.graph, run.batches, F.cross_entropy)
    direction = torch.randn(8, 4, dtype=torch.float64)
    with pytest.raises(UserError, match="which torch has not of hardsigmoid_backward; choose another"):
        data.products(tensors_of(run.network, run.graph), {"first.weight": direction}, ["first.weight"])
