"""Networks in which rounding alone changes the output by more than in most grow; those that a rule breaks do not."""

import itertools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from growlab import Grower
from growlab.growth import Net2Net, PairGrowth, ParityError, grow, make_seed
from growlab.growth.outputs import observe
from growlab.growth.parity import ROUNDING, compare, rounding, rounding_measured
from growlab.widths import trace
from tests.cases import Around
from tests.unit.growth.test_event import Broken
from tests.unit.growth.test_new_statistics import Products
from tests.unit.growth.test_new_statistics import seed_network as products

X = torch.randn(32, 5, generator=torch.Generator().manual_seed(1))


def seed_network(size: float, method: PairGrowth):
    """The output has a difference of two equal numbers in it, so many times as large as itself."""
    torch.manual_seed(0)
    network = nn.Sequential()
    for name, module in (
        *(("a", nn.Linear(5, 8)), ("act", nn.Tanh()), ("b", nn.Linear(8, 16)), ("relu", nn.ReLU())),
        ("classifier", nn.Linear(16, 3)),
    ):
        network.add_module(name, module)
    graph = trace(network, X)
    state = make_seed(network, graph, method, {name: g.full_width // 2 for name, g in graph.groups.items()}, seed=0)
    with torch.no_grad():
        network.b.weight[5], network.b.bias[5] = network.b.weight[0], network.b.bias[0]
        network.classifier.weight[:, 0] = size
        network.classifier.weight[:, 5] = -size
    return network, graph, state


@pytest.mark.parametrize("size", [1e4, 2e4])
def test_errors_as_large_as_rounding_every_weight_are_allowed(size):
    method = PairGrowth(noise_std=0.0)
    network, graph, state = seed_network(size, method)
    event = grow(network, graph, method, state, graph.full_widths, 0, X)
    usual = ROUNDING[torch.float32]
    assert usual < event.parity_error_eval <= event.parity_tolerance_eval <= 100 * usual


@pytest.mark.parametrize("size, wrong", [(1.0, 1.0005), (1e4, 1.05)])
def test_a_broken_rule_is_no_rounding(size, wrong):
    method = Broken(lambda w: w * wrong)
    network, graph, state = seed_network(size, method)
    with pytest.raises(ParityError, match="changed the output"):
        grow(network, graph, method, state, graph.full_widths, 0, X)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_it_is_measured_by_the_network_itself_which_stays_as_it_is(dtype):
    found = []
    for size in (1.0, 1e4):
        network, _, _ = seed_network(size, PairGrowth())
        network.to(dtype)
        before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
        outputs = observe(network, X.to(dtype))
        measured = rounding_measured(network, (X.to(dtype),), outputs)
        assert measured[0] == measured[1]
        found.append(measured[0] / rounding(network, outputs.eval))
        assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert found[0] == 1.0 <= found[1] <= 100.0
    assert found[1] > 1.0 or dtype == torch.float64


def lagging(method: PairGrowth):
    """A network with the running averages of other weights: in eval mode hardly anything is left of its input."""
    network, graph, state = products(lambda: Products(3), method)
    with torch.no_grad():
        network.classifier.bias.zero_()
        for norm in (network.norm, *network.norms):
            norm.running_var.fill_(1e12)
    return network, graph, state


def test_train_mode_decides_if_eval_mode_outputs_only_rounding():
    method = PairGrowth(noise_std=0.0)
    network, graph, state = lagging(method)
    event = grow(network, graph, method, state, graph.full_widths, 0, X)
    assert event.parity_error_eval > 1e-2 and event.parity_tolerance_eval is None
    assert event.parity_error_train <= 1e-5 and event.parity_tolerance_train <= 1e-2


@pytest.mark.parametrize(("wrong", "kept"), [(1.0, True), (1.001, False)])
def test_where_a_mode_outputs_only_rounding_the_other_decides(wrong: float, kept: bool) -> None:
    """Rounding of its input changes its output in eval mode by orders of magnitude, as lagging statistics may."""
    torch.manual_seed(0)
    chaotic_in_eval = Around(lambda net, x: x if net.training else (20 * (1e8 * x).sin()).exp())
    network = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4), chaotic_in_eval)
    after = observe(network, X)
    before = replace(after, eval=after.eval / 100, train=after.train * wrong)
    found = compare(network, (X,), before, after, list)
    assert found.errors[0] == pytest.approx(99) and found.kept is kept


def test_a_broken_rule_with_lagging_statistics_is_refused():
    method = Broken(lambda w: w * 1.02)
    network, graph, state = lagging(method)
    with pytest.raises(ParityError, match="changed the output"):
        grow(network, graph, method, state, graph.full_widths, 0, X)


class Counting(nn.Module):
    """Its output depends on the number of calls."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a, self.b, self.factor = nn.Linear(6, 16), nn.Linear(16, 3), factor
        # Nothing can set it back, as attributes and containers are after a look at the network.
        self.calls = itertools.count()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x))) * torch.full((), self.factor ** next(self.calls))


@pytest.mark.parametrize(("factor", "ends"), [(1.0005, nullcontext()), (1.1, pytest.raises(ParityError))])
def test_a_network_with_irreproducible_outputs_causes_a_warning(
    factor: float, ends: AbstractContextManager[Any], caplog: pytest.LogCaptureFixture
) -> None:
    x = torch.randn(8, 6)
    grower = Grower(Counting(factor), x, method=Net2Net(), trigger={0: 0.5, 1: 1.0})
    told = "Counting returns different outputs for the same inputs"
    with caplog.at_level("WARNING"):
        grower.step(epoch=0)
        assert not any(told in message for message in caplog.messages)
        with ends:
            grower.step(epoch=1)
    assert any(told in message for message in caplog.messages)
