"""Sums over channels that a parameter weighs: linear layers that are written out, as graph attention has them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import growlab
from tests.cases import Around


def pooled(net: Any, x: Tensor) -> Tensor:
    """A mean of positions, weighed by a learned query."""
    h = net.inside(x).tanh()
    return net.outside((h * (h * net.query).sum(-1, keepdim=True).softmax(1)).sum(1))


def pooling(function: Callable[[Any, Tensor], Tensor] = pooled) -> nn.Module:
    return Around(function, inside=[5, 16], outside=[16, 3], query=nn.Parameter(torch.randn(16)))


class GraphAttention(nn.Module):
    """A layer of a graph attention network (Velickovic et al. 2018) between all nodes that some numbers choose."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.channels = 4, 8
        self.inside, self.outside = nn.Linear(5, 32), nn.Linear(32, 3)
        self.source = nn.Parameter(torch.randn(1, 4, 8))
        self.target = nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        source, target = (x[:, :1] > x[:, 1:2].T).nonzero().T
        h = self.inside(x).view(-1, self.heads, self.channels)
        scores = (h * self.source).sum(dim=-1)[source] + (h * self.target).sum(dim=-1)[target]
        weights = F.leaky_relu(scores, 0.2).exp()
        total = weights.new_zeros(len(x), self.heads).index_add(0, target, weights) + 1e-9
        messages = (weights / total[target]).unsqueeze(-1) * h[source]
        out = h.new_zeros(len(x), self.heads, self.channels).index_add(0, target, messages)
        return self.outside(out.view(-1, self.heads * self.channels).relu())


@pytest.mark.parametrize("method", [growlab.VarianceTransfer(), growlab.Net2Net()], ids=lambda m: m.name)
@pytest.mark.parametrize(("kind", "width"), [(pooling, 16), (GraphAttention, 8)])
def test_channels_that_a_parameter_weighs_in_a_sum_grow_exactly(
    kind: Callable[[], nn.Module], width: int, method: growlab.growth.GrowthMethod
) -> None:
    torch.manual_seed(0)
    network, x = kind().double(), torch.randn(2, 5, 5).double()
    fresh = copy.deepcopy(network)
    grower = growlab.Grower(network, x, method=method, trigger={0: 0.5, 1: 1.0})
    assert grower.graph.full_widths == {"inside": width}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    (event,) = grower.step(epoch=1)
    assert event.parity_error_eval is not None
    assert max(event.parity_error_eval, event.parity_error_train) < 1e-10
    wanted = network(x)
    grower.finish()
    fresh.load_state_dict(network.state_dict())
    torch.testing.assert_close(fresh(x), wanted, rtol=1e-10, atol=1e-10)


def test_a_weight_that_is_read_elsewhere_too_keeps_the_channels() -> None:
    network = pooling(lambda net, x: pooled(net, x) + net.query.square().sum())
    assert growlab.trace(network, torch.randn(2, 5, 5)).full_widths == {}
