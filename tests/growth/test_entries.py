"""A network whose own forward applies bare weights and normalises: checkpoints load in any order, at any stage."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab import Grower, VarianceTransfer

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
STAGES = {0: 0.25, 1: 0.5, 2: 1.0}


class Bare(nn.Module):
    """Weights and a normalisation of its own, around a layer."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(16, 6) * 0.4), nn.Parameter(torch.randn(3, 16) * 0.3)
        self.gain, self.shift = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))
        self.hidden, self.normalised = nn.Linear(16, 16), normalised

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.first)
        if self.normalised:
            x = F.layer_norm(x, (x.shape[-1],), self.gain, self.shift)
        return F.linear(torch.relu(self.hidden(torch.relu(x))), self.last)


def begun(normalised: bool, stage: int, steps: int = 0) -> tuple[nn.Module, Grower, torch.optim.Optimizer]:
    torch.manual_seed(1)
    network = Bare(normalised).double()
    grower = Grower(network, X, method=VarianceTransfer(multipliers="keep"), trigger=STAGES)
    optimizer = torch.optim.Adam(network.parameters())
    grower.follow(optimizer)
    for epoch in range(stage + 1):
        grower.step(epoch=epoch)
        for _ in range(steps):
            optimizer.zero_grad()
            network(X).square().mean().backward()
            optimizer.step()
    return network, grower, optimizer


@pytest.mark.parametrize("start", [0, 1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("normalised", [False, True])
def test_checkpoints_of_weights_at_the_root_load_in_any_order(
    normalised: bool, stage: int, start: int
) -> None:
    saved = begun(normalised, stage, steps=3)
    states: list[Any] = [copy.deepcopy(one.state_dict()) for one in saved]
    assert any("unfinished_growth" in name for name in states[0]) == (stage > 0)
    for order in itertools.permutations(range(3)):
        loading = begun(normalised, start)
        for index in order:
            loading[index].load_state_dict(copy.deepcopy(states[index]))
        assert torch.equal(loading[0](X), saved[0](X)), order


def test_a_copy_loads_by_itself_and_nothing_is_left_behind() -> None:
    saved = copy.deepcopy(begun(False, 2, steps=3)[0].state_dict())
    network, grower, optimizer = begun(False, 0)
    twin, _ = copy.deepcopy((grower, optimizer))
    expected = network(X)
    twin.network.load_state_dict(saved)
    assert torch.equal(network(X), expected)
    assert not torch.equal(twin.network(X), expected)
    before = twin.network(X)
    twin.finish()
    torch.testing.assert_close(twin.network(X), before)
    grower.finish(at_any_stage=True)
    for module in (*network.modules(), *twin.network.modules()):
        assert not module._load_state_dict_pre_hooks
        assert not module._state_dict_hooks
    plain = Bare(False).double()
    plain.load_state_dict(twin.network.state_dict())
    torch.testing.assert_close(plain(X), before)
