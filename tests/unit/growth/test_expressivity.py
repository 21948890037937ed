"""Expressivity bottlenecks against least squares over every single weight of a layer."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from growlab.growth import Measurement, PairGrowth, bottlenecks, measurable, out_of_reach
from growlab.growth.expressivity import Bottleneck
from growlab.lab.networks import resnet20
from growlab.widths import trace
from tests.unit.growth.measured import Started, started


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)),
        *(nn.BatchNorm2d(6), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 3)),
    )


def by_hand(begun: Started, layer: nn.Module) -> tuple[float, float]:
    """E|V|^2, and the least E|V - dW b|^2 by a step of each of the layer's weights in turn."""
    read, slopes = [], []

    def keep(module: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        read.append(inputs[0].detach())
        output.register_hook(lambda slope: slopes.append(-slope))

    hook = layer.register_forward_hook(keep)
    begun.network.train()
    for x, y in begun.batches:
        F.cross_entropy(begun.network(x), y).backward()
    hook.remove()
    goal = torch.cat([slope * len(slope) for slope in slopes])
    columns = []
    for name, parameter in layer.named_parameters():
        for place in range(parameter.numel()):
            step = {other: torch.zeros_like(p) for other, p in layer.named_parameters()}
            step[name].view(-1)[place] = 1.0
            columns.append(torch.func.functional_call(layer, step, torch.cat(read)).flatten())
    matrix = torch.stack(columns, 1).detach()
    best = torch.linalg.lstsq(matrix, goal.flatten()[:, None], driver="gelsd").solution
    wanted = float(goal.square().sum()) / len(goal)
    missing = float((goal.flatten() - (matrix @ best)[:, 0]).square().sum()) / len(goal)
    return wanted, missing


def test_missing_equals_the_residual_of_least_squares() -> None:
    begun = started(convolutions(), (2, 6, 6), PairGrowth())
    data = Measurement(begun.network, begun.graph, begun.batches, F.cross_entropy)
    found = bottlenecks(begun.graph, begun.state.widths, data)
    readers = {"0": begun.network[2], "2": begun.network[7]}
    assert set(found) == set(readers)
    for group, layer in readers.items():
        wanted, missing = by_hand(begun, layer)
        assert found[group].wanted == pytest.approx(wanted, rel=1e-9)
        assert found[group].missing == pytest.approx(missing, rel=1e-6)
        assert 0 < missing < wanted
    assert 0 < out_of_reach(found) < 1 and data.cost.samples == 24


def test_groups_at_full_width_are_left_out() -> None:
    begun = started(convolutions(), (2, 6, 6), PairGrowth())
    begun.grow({"0": 4})
    data = Measurement(begun.network, begun.graph, begun.batches, F.cross_entropy)
    assert set(bottlenecks(begun.graph, begun.state.widths, data)) == {"2"}


def test_streams_that_several_layers_put_out_have_none() -> None:
    network = resnet20((3, 8, 8), 10)
    graph = trace(network, torch.randn(2, 3, 8, 8))
    groups = {fans.group for fans in measurable(graph, network)}
    assert groups == {f"layers.{stage}.{block}.conv1" for stage in range(3) for block in range(3)}


@given(st.floats(0, 1), st.lists(st.floats(0.1, 10), min_size=1), st.floats(0.01, 100))
def test_out_of_reach_does_not_depend_on_the_unit_of_the_loss(part, wanted, unit) -> None:
    """If every layer lacks the same part, so does the network."""
    found = {str(i): Bottleneck(unit * one, unit * one * part) for i, one in enumerate(wanted)}
    assert out_of_reach(found) == pytest.approx(part, rel=1e-9, abs=1e-12)


def test_nothing_wanted_is_out_of_reach() -> None:
    assert out_of_reach({}) == 1.0
