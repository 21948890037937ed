"""Optimizers go on with the same training where weights keep their shape but are multiplied otherwise."""

import copy
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from growlab import Grower, UserError, VarianceTransfer
from tests.cases import Around

NARROW, WIDE = {"a": 8, "b": 4, "d": 8}, {"a": 16, "b": 4, "d": 16}


def planted(method: VarianceTransfer, narrow: Mapping[str, int] | None = None) -> tuple[Grower, torch.Tensor]:
    """A stream that never widens is read by a normalisation, which undoes its new scale, and by a layer that cannot."""
    torch.manual_seed(0)
    network = Around(
        lambda net, x: net.e(torch.relu(net.d(net.norm(y := net.b(torch.relu(net.a(x)))) + net.c(y)))),
        **{"a": [6, 16], "b": [16, 4], "norm": nn.BatchNorm1d(4), "c": [4, 4], "d": [4, 16], "e": [16, 3]},
    ).double()
    x = torch.randn(32, 6).double()
    grower = Grower(network, x, method=method, trigger={0: narrow or NARROW, 1: WIDE})
    grower.step(epoch=0)
    return grower, x


def backward(grower: Grower, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of a loss of which the output's factor is no part."""
    grower.network.zero_grad()
    (grower.network(x) * torch.linspace(-1.0, 2.0, 96).view(32, 3)).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in grower.network.named_parameters()}


@pytest.mark.parametrize("output_multiplier", [True, False])
def test_a_weight_of_the_same_shape_that_is_multiplied_keeps_its_momentum(output_multiplier: bool) -> None:
    grower, x = planted(VarianceTransfer(output_multiplier=output_multiplier))
    network = grower.network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0, momentum=0.9)
    grower.follow(optimizer, state="inherit")
    backward(grower, x)
    optimizer.step()
    (event,) = grower.step(epoch=1)
    assert "c.weight" in event.report["multipliers"] or not output_multiplier
    accumulated = {name: p.grad.clone() for name, p in network.named_parameters()}
    for name, now in backward(grower, x).items():
        momentum = optimizer.state[network.get_parameter(name)]["momentum_buffer"]
        old = momentum != 0
        assert old.any()
        for kept in (momentum, accumulated[name]):
            # But for what the normalisation's eps does.
            assert (kept - now)[old].norm() < 1e-3 * now[old].norm(), name


@pytest.mark.parametrize("make", ["sgd", "adam", "lookahead"])
def test_training_continues_after_finish_as_without(make: str) -> None:
    grower, x = planted(VarianceTransfer(multipliers="keep"))
    optimizer = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-12),
        "lookahead": lambda p: torch.optim.ASGD(p, lr=0.01, t0=0),
    }[make](grower.network.parameters())
    grower.follow(optimizer)

    def train(grower: Grower, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        for _ in range(3):
            grower.network(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(grower, optimizer)
    grower.step(epoch=1)
    train(grower, optimizer)
    assert grower.state.multipliers
    twin, twins = copy.deepcopy((grower, optimizer))
    for one in (grower, twin):
        # A gradient that is being accumulated.
        one.network(x).square().mean().backward()
    first, second = grower.finish(), twin.network
    assert not torch.equal(first.get_parameter("c.weight"), second.get_parameter("c.weight"))
    if make == "adam":
        # It normalises gradients: rows go on with steps of their own length, along the same moments.
        for name, parameter in first.named_parameters():
            other = second.get_parameter(name)
            scale = (parameter / other).detach()
            moments, others = optimizer.state[parameter], twins.state[other]
            torch.testing.assert_close(moments["exp_avg"], others["exp_avg"] * scale)
            torch.testing.assert_close(moments["exp_avg_sq"], others["exp_avg_sq"] * scale**2)
        return
    for one, its in ((grower, optimizer), (twin, twins)):
        its.step()
        train(one, its)
    twin.finish()
    torch.testing.assert_close(first(x), second(x), rtol=1e-9, atol=1e-12)
    if make == "lookahead":
        for one, two in zip(first.parameters(), second.parameters(), strict=True):
            torch.testing.assert_close(optimizer.state[one]["ax"], twins.state[two]["ax"], rtol=1e-3, atol=1e-6)


def test_the_outputs_factor_that_is_folded_divides_moments() -> None:
    grower, x = planted(VarianceTransfer(rescale_layers_without_batch_norm=True))
    network = grower.network
    optimizer = torch.optim.Adam(network.parameters(), lr=0.0)
    grower.follow(optimizer)
    grower.step(epoch=1)
    assert grower.state.output_factor != 1.0
    backward(grower, x)
    optimizer.step()
    grower.finish()
    kept = {name: p.grad.clone() for name, p in network.named_parameters()}
    for name, now in backward(grower, x).items():
        state = optimizer.state[network.get_parameter(name)]
        torch.testing.assert_close(kept[name], now)
        torch.testing.assert_close(state["exp_avg"], 0.1 * now)
        torch.testing.assert_close(state["exp_avg_sq"], 0.001 * now.square())


def test_state_that_cannot_follow_a_weight_of_the_same_shape_is_refused_before_anything_has_grown() -> None:
    grower, x = planted(VarianceTransfer())
    optimizer = torch.optim.Adafactor([grower.network.get_parameter("c.weight")])
    grower.follow(optimizer, state="inherit")
    backward(grower, x)
    optimizer.step()
    with pytest.raises(UserError, match=r"of c\.weight"):
        grower.step(epoch=1)
    assert grower.state.widths == NARROW
    assert grower.network.get_parameter("a.weight").shape == (8, 6)


def test_accumulated_gradients_of_tensors_that_stay_are_rescaled() -> None:
    """Logits that shrink for good divide the gradients of layers in front that keep their widths, too."""
    grower, x = planted(VarianceTransfer(output_multiplier=False), {**NARROW, "a": 16})
    network = grower.network
    before, first = backward(grower, x), network.a.weight
    (event,) = grower.step(epoch=1)
    assert network.a.weight is first and event.output_factor == 2.0
    accumulated = {name: p.grad.clone() for name, p in network.a.named_parameters(prefix="a")}
    now = backward(grower, x)
    for name, kept in accumulated.items():
        torch.testing.assert_close(kept, now[name])
        torch.testing.assert_close(kept, before[name] / 2.0)
