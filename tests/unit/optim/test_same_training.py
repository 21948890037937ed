"""Optimizers continue the same training: under other multipliers, and by name in another process."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from growlab import Grower, UserError, VarianceTransfer, optim
from growlab.optim import load_named_state, named_state
from tests.cases import Around, same_parameters
from tests.cases import train as take_step

NARROW, WIDE = {"a": 8, "b": 4, "d": 8}, {"a": 16, "b": 4, "d": 16}


def planted(method: VarianceTransfer, narrow: Mapping[str, int] | None = None) -> tuple[Grower, torch.Tensor]:
    """A stream of fixed width, read by a normalisation, which cancels its new scale, and by a layer, which does not."""
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
    """Gradients of a fixed linear function of the output, without the output factor."""
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
            # Up to the normalisation's eps.
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
        # Accumulate a gradient before finishing.
        one.network(x).square().mean().backward()
    first, second = grower.finish(), twin.network
    assert not torch.equal(first.get_parameter("c.weight"), second.get_parameter("c.weight"))
    if make == "adam":
        # Adam normalises gradients, so steps of rescaled rows differ; compare the moments.
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


def test_state_that_cannot_follow_a_weight_of_the_same_shape_raises_an_error_before_growth() -> None:
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
    """Logits that shrink also divide the gradients of earlier layers whose widths stay."""
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


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "sgd_plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "own_sgd": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, rule=optim.MaxOne()),
    "own_adamw": lambda p: optim.AdamW(p, lr=0.01, rule=optim.NormRatio()),
    "avagrad": lambda p: optim.AvaGrad(p, lr=0.1),
    "lars": lambda p: optim.LARS(p, lr=0.1, momentum=0.9),
    "muon": lambda p: optim.Muon(p, lr=0.01),
}


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        take_step(model, optimizer, torch.randn(5, 6, generator=torch.Generator().manual_seed(step)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    make, uninterrupted = OPTIMIZERS[name], network(0)
    optimizer = make(uninterrupted.parameters())
    train(uninterrupted, optimizer, range(4))
    file = tmp_path / "start.pt"
    torch.save({"weights": uninterrupted.state_dict(), "optimizer": named_state(optimizer, uninterrupted)}, file)
    train(uninterrupted, optimizer, range(4, 9))
    saved = torch.load(file, weights_only=True)
    for with_state in (True, False):
        resumed = network(1)
        resumed.load_state_dict(saved["weights"])
        other = make(resumed.parameters())
        if with_state:
            load_named_state(other, resumed, saved["optimizer"])
        train(resumed, other, range(4, 9))
        assert same_parameters(uninterrupted, resumed) == (with_state or name == "sgd_plain")


def test_state_is_found_by_name_in_any_groups_and_order() -> None:
    model, again = network(0), network(0)
    one = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, one, range(3))
    taken = named_state(one, model)
    again.load_state_dict(model.state_dict())
    vectors, matrices = ([p for p in again.parameters() if p.dim() == dim] for dim in (1, 2))
    other = torch.optim.AdamW([{"params": vectors}, {"params": matrices[::-1], "weight_decay": 0.1}], lr=0.5)
    load_named_state(other, again, taken)
    theirs = dict(again.named_parameters())
    for key, parameter in model.named_parameters():
        for entry, value in one.state[parameter].items():
            assert torch.equal(other.state[theirs[key]][entry], value)
    # Settings stay, and training does not change the named state.
    assert [(group["lr"], group["weight_decay"]) for group in other.param_groups] == [(0.5, 0.01), (0.5, 0.1)]
    before = {key: value["exp_avg"].clone() for key, value in taken["state"].items()}
    train(again, other, range(3, 5))
    assert all(torch.equal(value, taken["state"][key]["exp_avg"]) for key, value in before.items())


def test_state_of_missing_parameters_is_ignored() -> None:
    model = network(0)
    stranger = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([*model.parameters(), stranger], lr=0.01)
    stranger.grad = torch.ones(2)
    train(model, optimizer, range(1))
    taken = named_state(optimizer, model)
    assert taken["state"].keys() == dict(model.named_parameters()).keys()
    del taken["state"]["0.weight"]
    other = torch.optim.AdamW(model.parameters(), lr=0.01)
    load_named_state(other, model, taken)
    assert model[0].weight not in other.state and model[0].bias in other.state


def test_another_optimizer_or_shape_raises_an_error_and_changes_nothing() -> None:
    model = network(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    taken = named_state(optimizer, model)
    other = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"of torch.optim.adamw.AdamW, not of torch.optim.sgd.SGD"):
        load_named_state(other, model, taken)
    wide = nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.Tanh(), nn.Linear(9, 3))
    other = torch.optim.AdamW(wide.parameters(), lr=0.01)
    with pytest.raises(ValueError, match=r"exp_avg of 0.weight is \[8, 6\], not \[9, 6\]"):
        load_named_state(other, wide, taken)
    assert not other.state


def test_optimizer_state_with_arbitrary_objects_raises_an_error() -> None:
    model = network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight]["history"] = object()
    with pytest.raises(ValueError, match=r"SGD's state of 0.weight contains a object"):
        named_state(optimizer, model)
