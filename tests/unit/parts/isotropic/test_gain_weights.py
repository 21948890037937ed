"""Weights for gains that are constant or decay, and inputs that come and go."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.grower import Grower
from growlab.grower.triggers import ByMethod
from growlab.parts.isotropic import GainWeights, Isotropic, IsotropicMLP, change_inputs
from growlab.parts.isotropic.part import gain_weights, readers


def made() -> tuple[IsotropicMLP, Tensor, Tensor]:
    torch.manual_seed(0)
    network = IsotropicMLP(6, [5, 7], 3, gain_channel=True).double()
    for layer in readers(network):
        with torch.no_grad():
            layer.weight[:, -1].normal_()
    return network, torch.randn(24, 6, dtype=torch.float64), torch.arange(24) % 3


def trained(network: nn.Module, x: Tensor, y: Tensor, part: GainWeights | None, steps: int, make: Any) -> None:
    parts = () if part is None else (part,)
    grower = Grower(network, x[:2], method=Isotropic(first=10**6), trigger=ByMethod(), parts=parts)
    optimizer = make(network.parameters())
    grower.follow(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def test_constant_weights_are_what_a_network_without_a_gradient_for_them_keeps() -> None:
    """The same steps with psi in a vector of its own that has no gradient, as in the author's later code."""
    network, x, y = made()
    twin, psi = copy.deepcopy(network), [gain_weights(layer).clone() for layer in readers(network)]
    trained(network, x, y, GainWeights("constant"), 7, adamw)
    weights = [nn.Parameter(layer.weight.detach()[:, :-1].clone()) for layer in readers(twin)]
    first, *behind = [m for m in twin.modules() if isinstance(m, nn.Linear)]
    activations = [m for m in twin.hidden if not isinstance(m, nn.Linear)]
    parameters = [first.weight, first.bias, *weights, *(layer.bias for layer in behind)]
    parameters += [activation.log_length for activation in activations]
    optimizer = adamw(parameters)
    for _ in range(7):
        optimizer.zero_grad()
        h = first(x)
        for activation, weight, vector, layer in zip(activations, weights, psi, behind, strict=True):
            gain = activation.gain(h)
            h = (gain * h) @ weight.T + gain * vector.T + layer.bias
        F.cross_entropy(h, y).backward()
        optimizer.step()
    for layer, weight, vector in zip(readers(network), weights, psi, strict=True):
        assert torch.equal(gain_weights(layer), vector)
        assert torch.allclose(layer.weight[:, :-1], weight, rtol=1e-10)


def test_decayed_weights_have_the_gradient_of_their_squares() -> None:
    network, x, y = made()
    twin = copy.deepcopy(network)
    trained(network, x, y, GainWeights("decayed", 0.3), 5, adamw)
    optimizer = adamw(twin.parameters())
    for _ in range(5):
        optimizer.zero_grad()
        decay = sum(layer.weight[:, -1].square().sum() for layer in readers(twin))
        (F.cross_entropy(twin(x), y) + 0.3 * decay).backward()
        optimizer.step()
    for a, b in zip(network.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-12)


def test_neurons_that_go_leave_their_biases_in_constant_weights() -> None:
    network, x, y = made()
    method, part = Isotropic(reserve_neurons=1, threshold=0.5), GainWeights("constant")
    grower = Grower(network, x[:2], method=method, trigger=ByMethod(), parts=[part])
    optimizer = adamw(network.parameters())
    grower.follow(optimizer)
    for step in range(4):
        psi = [gain_weights(layer).clone() for layer in readers(network)]
        (event,) = grower.step(epoch=step) or [None]
        changed = [not torch.equal(gain_weights(layer), old) for layer, old in zip(readers(network), psi, strict=True)]
        assert event is not None or not any(changed)
        psi = [gain_weights(layer).clone() for layer in readers(network)]
        optimizer.zero_grad()
        F.cross_entropy(network(x), y).backward()
        optimizer.step()
        assert all(torch.equal(gain_weights(layer), old) for layer, old in zip(readers(network), psi, strict=True))
    assert any(min(e.widths_after.values()) < min(e.widths_before.values()) for e in grower.events)


@pytest.mark.parametrize(
    ("mode", "decay", "message"),
    [("all", 0.1, "mode must be constant or decayed, not 'all'"), ("decayed", -1, "decay must be at least 0, not -1")],
)
def test_impossible_settings_are_refused(mode: Any, decay: float, message: str) -> None:
    with pytest.raises(UserError, match=message):
        GainWeights(mode, decay)


def test_a_network_without_gains_is_refused() -> None:
    network = IsotropicMLP(6, [5], 3).double()
    with pytest.raises(UserError, match="needs layers that read gains"):
        trained(network, torch.randn(4, 6, dtype=torch.float64), torch.arange(4) % 3, GainWeights(), 0, adamw)


@pytest.mark.parametrize(("convolution", "optimizer"), [(False, "SGD"), (True, "Adam")])
def test_new_inputs_change_nothing_and_learn_from_the_first_step(convolution: bool, optimizer: str) -> None:
    torch.manual_seed(0)
    layer = (nn.Conv2d(3, 4, 3, padding=1) if convolution else nn.Linear(3, 4)).double()
    shape = (8, 5, 4, 4) if convolution else (8, 5)
    x = torch.randn(shape, dtype=torch.float64)
    options = {"lr": 0.01, "momentum": 0.9} if optimizer == "SGD" else {"lr": 0.01}
    made = getattr(torch.optim, optimizer)(layer.parameters(), **options)
    layer(x[:, :3]).square().mean().backward()
    made.step()
    key = "momentum_buffer" if optimizer == "SGD" else "exp_avg"
    known, before = made.state[layer.weight][key].clone(), layer(x[:, :3])
    change_inputs(layer, 2, made)
    assert torch.equal(made.state[layer.weight][key][:, :3], known)
    assert made.state[layer.weight][key].shape == layer.weight.shape
    assert torch.allclose(layer(x), before, rtol=1e-12)
    made.zero_grad()
    layer(x).square().mean().backward()
    made.step()
    assert layer.weight[:, 3:].count_nonzero() == layer.weight[:, 3:].numel()
    whole = layer(x * torch.tensor([1.0, 1, 1, 0, 0]).view(-1, *[1] * (x.dim() - 2)))
    change_inputs(layer, -2, made)
    assert torch.allclose(layer(x[:, :3]), whole, rtol=1e-12)
    assert [p.shape for group in made.param_groups for p in group["params"]] == [p.shape for p in layer.parameters()]


def test_inputs_that_cannot_change_are_refused() -> None:
    network = made()[0]
    with pytest.raises(ValueError, match="6 of 6 inputs cannot go"):
        change_inputs(network.hidden[0], -6)
    with pytest.raises(ValueError, match="and no gain behind them"):
        change_inputs(network.hidden[2], 1)
