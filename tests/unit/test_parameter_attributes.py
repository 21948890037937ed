"""Attributes that a user sets on parameters and buffers: forwards read them, and they stay through growth."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from growlab import Grower, VarianceTransfer, parts, trace
from growlab.growth import PairGrowth
from tests.cases import Around

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Shape:
    """A parameter's shape at base width, as mup attaches it."""

    def __init__(self, base: int, width: int) -> None:
        self.base, self.width = base, width

    def multiplier(self) -> float:
        return self.width / self.base


class Readout(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.weight.infshape.multiplier()) * self.bias.gain  # type: ignore[attr-defined]


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), getattr(self.weight, "heads", 1), -1).flatten(1)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    centred = Around(lambda net, x: x - net.mean - net.mean.shift, mean=nn.Buffer(torch.zeros(16)))
    made = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), centred, Scaled(16, 16), nn.ReLU(), Readout(16, 3))
    made = made.double()
    made[5].weight.infshape = Shape(4, 16)  # type: ignore[union-attr]
    made[5].bias.gain = 2.0  # type: ignore[union-attr]
    made[2].mean.shift = 0.5  # type: ignore[union-attr]
    made[3].weight.heads = 4  # type: ignore[union-attr]
    made[0].weight.no_decay = True  # type: ignore[union-attr]
    return made


@pytest.mark.parametrize("method", [VarianceTransfer, PairGrowth])
def test_attributes_are_read_and_kept_through_growth(method: Any) -> None:
    made = network()
    shape = made[5].weight.infshape
    assert trace(made, X).groups.keys() >= {"0", "3"}
    grower = Grower(made, X, method=method(), trigger={0: 0.25, 1: 0.5, 2: 1.0}, parts=[parts.Averages(0.5)])
    for epoch in range(3):
        grower.step(epoch=epoch)
        for each in (made, grower.parts[0].module):
            assert each[5].weight.infshape is shape and each[5].bias.gain == 2.0
            assert each[2].mean.shift == 0.5 and each[0].weight.no_decay and each[3].weight.heads == 4
            assert each(X).isfinite().all()
    assert all(event.parity_error_eval < 1e-12 for event in grower.events)
    twin = copy.deepcopy(grower)
    torch.testing.assert_close(twin.network(X), made(X))
    grower.finish()
    fresh = network()
    fresh.load_state_dict(made.state_dict())
    torch.testing.assert_close(fresh(X), made(X), atol=1e-12, rtol=0)
