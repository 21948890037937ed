"""Newborn entries by themselves: a rate that rises again, old entries that stay, optimizer state that is reset."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growlab import Grower, HyperCloning, UserError
from growlab.grower.part import Part
from growlab.parts import Freeze, Warmup

X = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
RATE = 0.01
OPTIMIZERS: dict[str, Callable[[Any], list[torch.optim.Optimizer]]] = {
    "sgd": lambda n: [torch.optim.SGD(n.parameters(), lr=RATE, momentum=0.9, weight_decay=0.1)],
    "adamw": lambda n: [torch.optim.AdamW(n.parameters(), lr=RATE, weight_decay=0.1)],
    "two": lambda n: [
        torch.optim.AdamW([p for p in n.parameters() if p.dim() == 2], lr=RATE),
        torch.optim.SGD([p for p in n.parameters() if p.dim() == 1], lr=RATE),
    ],
}


class Perceptron(nn.Module):
    """A residual stream of fixed width with hidden layers that grow."""

    def __init__(self, width: int, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)) for _ in range(layers)
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(network: nn.Module, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        (network(X) - 1).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()


def grown(
    name: str, parts: list[Part], state: Any = "auto", layers: int = 2, width: int = 8, steps: int = 3
) -> tuple[Any, list[torch.optim.Optimizer], Any]:
    """A small network that trained, grew at epoch 1 and is about to train on."""
    torch.manual_seed(0)
    small = Perceptron(4)
    optimizers = OPTIMIZERS[name](small)
    train(small, optimizers, steps)
    torch.manual_seed(1)
    wide = Perceptron(width, layers)
    grower = Grower.from_trained(
        small, wide, X, optimizer=optimizers, parts=parts, state=state, verbose=False,
        method=HyperCloning(noise_std=0.1), trigger={0: "small", 1: 1.0},
    )  # fmt: skip
    train(wide, optimizers, 1)
    grower.step(epoch=1)
    return wide, optimizers, grower


def moves(network: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    train(network, optimizers, 1)
    return {name: p.detach() - before[name] for name, p in network.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_newborn_entries_move_by_a_part_of_the_step_and_others_by_all_of_it(name: str) -> None:
    wide, optimizers, grower = grown(name, [Warmup(4)])
    twin, others, _ = grown(name, [])
    masks = grower.newborn().masks
    assert set(masks) == {f"layers.{i}.{n}" for i in range(2) for n in ("0.weight", "0.bias", "2.weight")}
    for step in range(1, 6):
        twin.load_state_dict(wide.state_dict())
        found, expected = moves(wide, optimizers), moves(twin, others)
        for key, whole in expected.items():
            factor = torch.ones_like(whole)
            if key in masks:
                factor[masks[key]] = min(1.0, step / 4)
            assert torch.allclose(found[key], factor * whole, rtol=1e-9, atol=1e-14), (step, key)


def test_all_entries_may_warm_up_by_the_rates_of_groups() -> None:
    wide, optimizers, grower = grown("two", [Warmup(4, who="all")])
    twin, others, _ = grown("two", [])
    assert grower.events
    found, expected = moves(wide, optimizers), moves(twin, others)
    assert all(torch.allclose(found[key], whole / 4, rtol=1e-9, atol=1e-14) for key, whole in expected.items())
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {RATE}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_old_entries_stay_bit_for_bit(name: str) -> None:
    wide, optimizers, grower = grown(name, [Freeze()])
    new = grower.newborn()
    before = {key: p.detach().clone() for key, p in wide.named_parameters()}
    train(wide, optimizers, 5)
    for key, parameter in wide.named_parameters():
        mask = new.masks.get(key, torch.zeros_like(parameter, dtype=torch.bool))
        assert torch.equal(parameter[~mask], before[key][~mask])
        assert bool((parameter[mask] != before[key][mask]).all())


def test_old_entries_move_again_after_so_many_steps() -> None:
    wide, optimizers, grower = grown("adamw", [Freeze(2)])
    mask = grower.newborn().masks["layers.0.0.weight"]
    moved = [bool(moves(wide, optimizers)["layers.0.0.weight"][~mask].any()) for _ in range(4)]
    assert moved == [False, False, True, True]


def test_old_layers_stay_bit_for_bit_and_new_ones_warm_up() -> None:
    """LLaMA-Pro: new blocks alone train, with an optimizer of all parameters that decays weights."""
    wide, optimizers, grower = grown("adamw", [Freeze(), Warmup(3)], layers=4, width=4)
    new = grower.newborn()
    assert set(new.parameters) == {f"layers.{i}.{n}.{w}" for i in (1, 3) for n in (0, 2) for w in ("weight", "bias")}
    before = {key: p.detach().clone() for key, p in wide.named_parameters()}
    train(wide, optimizers, 100)
    moved = {key for key, p in wide.named_parameters() if not torch.equal(p, before[key])}
    assert moved == set(new.parameters)


@pytest.mark.parametrize("stop", [1, 3])
def test_a_resumed_training_is_equal_bit_for_bit(stop: int) -> None:
    def begin() -> tuple[Any, list[torch.optim.Optimizer], Any]:
        return grown("adamw", [Warmup(4), Freeze(6)])

    wide, optimizers, _ = begin()
    train(wide, optimizers, 8)
    first, (optimizer,), grower = begin()
    train(first, [optimizer], stop)
    saved = copy.deepcopy([each.state_dict() for each in (first, optimizer, grower)])
    again, (other,), resumed = begin()
    train(again, [other], 2)
    for each, state in zip((again, other, resumed), saved, strict=True):
        each.load_state_dict(state)
    train(again, [other], 8 - stop)
    assert all(torch.equal(a, b) for a, b in zip(wide.parameters(), again.parameters(), strict=True))


def test_state_of_newborn_entries_alone_is_reset() -> None:
    found = {}
    for state in ("inherit", "reset_new"):
        wide, (optimizer,), grower = grown("adamw", [], state)
        found[state] = {name: optimizer.state[p]["exp_avg_sq"] for name, p in wide.named_parameters()}
    for name, mask in grower.newborn().masks.items():
        carried, reset = (found[state][name] for state in ("inherit", "reset_new"))
        assert torch.equal(reset[~mask], carried[~mask]) and bool((carried[~mask] > 0).all())
        assert not reset[mask].any() and bool((carried[mask] > 0).all())


def test_layers_begin_without_state_where_that_is_reset() -> None:
    wide, (optimizer,), _ = grown("adamw", [], "reset_new", layers=4, width=4)
    known = {name for name, p in wide.named_parameters() if p in optimizer.state}
    assert known == {name for name, _ in wide.named_parameters() if name[7] in "02"}


@pytest.mark.parametrize(
    "make",
    [lambda: Warmup(0), lambda: Warmup(3, who="old"), lambda: Freeze(0), lambda: Freeze(1.5)],  # type: ignore[arg-type]
)
def test_bad_arguments_are_refused(make: Callable[[], Part]) -> None:
    with pytest.raises(UserError):
        make()
