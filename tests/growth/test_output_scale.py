"""What the growth methods leave on the output, and whether the last layers can take it up."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.errors import UserError
from growlab.growth import PairGrowth, finish, grow, plant
from growlab.widths import WidthGraph, trace
from tests.cases import METHODS, PRESERVING, outputs


class Ending(nn.Module):
    """Two hidden layers, then whatever `end` makes of them."""

    def __init__(self, end: Callable[["Ending", Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 12), nn.Linear(12, 16), nn.BatchNorm1d(16)
        self.classifier, self.other = nn.Linear(16, 5), nn.Linear(16, 5)
        self.last_norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.rand(5) + 0.5)
        self.end = end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self, F.relu(self.norm(self.second(F.relu(self.first(x))))))


# The first ones end with affine layers, whose scale can be changed; the others do not.
FOLDED = {
    "linear": lambda net, h: net.classifier(h),
    "relu": lambda net, h: F.relu(net.classifier(h)),
    "sum": lambda net, h: net.classifier(h) + net.other(h),
    "concatenation": lambda net, h: torch.cat([net.classifier(h), net.other(h)], 1),
    "divided": lambda net, h: net.classifier(h) / 2,
}
PINNED = {
    "log_softmax": lambda net, h: F.log_softmax(net.classifier(h), 1),
    "tanh": lambda net, h: torch.tanh(net.classifier(h)),
    "scaled": lambda net, h: net.classifier(h) * net.scale,
    "shifted": lambda net, h: net.classifier(h) + net.scale,
    "batch norm": lambda net, h: net.last_norm(net.classifier(h)),
    "product": lambda net, h: net.classifier(h) * net.other(h),
    "normalised": lambda net, h: F.normalize(net.classifier(h)),
    "mean": lambda net, h: h.mean(1, keepdim=True),
}
ENDS = FOLDED | PINNED


def made(end: str) -> tuple[Ending, WidthGraph, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network, x = Ending(ENDS[end]).double(), torch.randn(16, 6, dtype=torch.float64)
    return network, trace(network, x), x


@pytest.mark.parametrize("method", PRESERVING)
@pytest.mark.parametrize("end", ENDS)
def test_whatever_factor_is_left_can_be_folded(end: str, method: str) -> None:
    network, graph, x = made(end)
    stages = [
        {name: max(2, group.full_width // part) for name, group in graph.groups.items()} for part in (4, 2, 1)
    ]
    growing = METHODS[method].make(0.0)
    state = plant(network, graph, growing, stages[0], 0)
    for widths in stages[1:]:
        grow(network, graph, growing, state, widths, 0, (x,))
    before = outputs(network, x, training=False) * state.output_factor
    if end in PINNED:
        assert state.output_factor == 1.0
    elif method == "ours":
        assert state.output_factor == pytest.approx(4.0)
    finish(network, graph, growing, state)
    torch.testing.assert_close(outputs(network, x, training=False), before, rtol=1e-12, atol=1e-12)


class Halving(PairGrowth):
    """Claims a factor whatever the network ends with."""

    def grow(self, expansion):
        return replace(super().grow(expansion), output_factor=2.0)


@pytest.mark.parametrize("end", ENDS)
def test_a_factor_that_could_not_be_folded_is_refused_before_training(end: str) -> None:
    network, graph, _ = made(end)
    widths = dict.fromkeys(graph.groups, 4)
    method = Halving()
    if end in FOLDED:
        plant(network, graph, method, widths, 0)
        return
    with pytest.raises(UserError, match="Halving rescales this network's output") as raised:
        plant(network, graph, method, widths, 0)
    assert "\n" not in str(raised.value)
    network, graph, _ = made(end)
    method.output_multiplier = False
    plant(network, graph, method, widths, 0)
