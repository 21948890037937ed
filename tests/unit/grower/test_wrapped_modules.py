"""Activation checkpointing by torch's wrapper, put on before or after the Grower is made, changes no numbers."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    ActivationWrapper,
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.optim.swa_utils import AveragedModel

from growlab import Grower, Net2Net, PairGrowth, VarianceTransfer
from growlab.parts import Averages

X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2)).double()


def one(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model[1] = wrap(model[1])


def inner(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model[1].up, model[3] = wrap(model[1].up), wrap(model[3])


def nested(model: Any, wrap: Callable[[nn.Module], nn.Module]) -> None:
    model[2].down = wrap(model[2].down)
    model[2] = wrap(model[2])


def train(method: Any, change: Any = None, at: int = -2) -> tuple[Any, Grower, list[Any]]:
    """Three stages; wrappers come before the Grower is made (-2), before anything follows it (-1), or in a stage."""
    model = network()
    if at == -2 and change:
        change(model)
    grower = Grower(model, X, method=method, trigger={0: 0.5, 1: 0.75, 2: 1.0}, parts=[Averages(0.9)], anneal_steps=3)
    if at == -1 and change:
        change(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = AveragedModel(model)
    grower.follow(optimizer, average)
    found: list[Any] = []
    for epoch in range(3):
        grower.step(epoch=epoch)
        if at == epoch and change:
            change(model)
        for _ in range(4):
            optimizer.zero_grad()
            (model(X) - 1).square().mean().backward()
            optimizer.step()
        found += [{name: t.clone() for name, t in model.state_dict().items()}, sorted(grower.regions())]
        found.append({name: t.clone() for name, t in average.module.state_dict().items()})
        model.load_state_dict(model.state_dict())
    return model, grower, found


@cache
def unwrapped(method: Any) -> list[Any]:
    return train(method())[2]


@pytest.mark.parametrize(
    ("method", "place", "at"),
    [
        *((VarianceTransfer(), place, at) for place, at in ((one, -1), (inner, 1), (nested, -2), (nested, 0))),
        (PairGrowth(), nested, -1),
        (Net2Net(), inner, 0),
    ],
)
def test_training_is_the_same(method: Any, place: Any, at: int) -> None:
    expected = unwrapped(type(method))
    model, grower, found = train(method, lambda model: place(model, checkpoint_wrapper), at)
    # Traced by other names it has other draws.
    for one_, other in zip(found, expected, strict=True) if at > -2 else ():
        if isinstance(one_, list):
            assert one_ == other
            continue
        assert one_.keys() == other.keys()
        for name, tensor in one_.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-12)
    twin = copy.deepcopy(grower)
    twin.network.eval()
    assert torch.equal(twin.network(X), model.eval()(X))
    twin.finish()
    output = model(X)
    grower.finish()
    torch.testing.assert_close(model(X), output, rtol=1e-10, atol=1e-12)
    plain = network()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(plain.eval()(X), output, rtol=1e-10, atol=1e-12)
    assert any("_checkpoint_wrapped_module" in name for name, _ in model.named_parameters())
    assert any(isinstance(module, ActivationWrapper) for module in model.modules())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "wrap",
    [offload_wrapper, lambda module: checkpoint_wrapper(module, checkpoint_impl=CheckpointImpl.REENTRANT)],
    ids=["offload", "reentrant"],
)
def test_other_wrappers(wrap: Any) -> None:
    expected = unwrapped(PairGrowth)
    _, _, found = train(PairGrowth(), lambda model: one(model, wrap), -1)
    for name, tensor in found[-1].items():
        torch.testing.assert_close(tensor, expected[-1][name], rtol=1e-9, atol=1e-12)
