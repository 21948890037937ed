"""New weights of ordinary networks: normal, or as a hypernetwork emits them (hyperfan)."""

import os
from math import prod, sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from growlab import Grower
from growlab.base.errors import UserError
from growlab.growth import (
    FixedSize,
    GrowthContext,
    NewWeights,
    PairGrowth,
    RandomGrowth,
    VarianceTransfer,
    grow,
    make_seed,
)
from growlab.growth.method import normal
from growlab.widths import tensors_of, trace
from tests.cases import NETWORKS, graph_of, outputs, roughen, widths_at

RULES = ("fan_in", "hyperfan_in", "hyperfan_out")


def wide() -> tuple[torch.nn.Module, GrowthContext]:
    network = torch.nn.Sequential(
        *(torch.nn.Conv2d(3, 24, 3), torch.nn.ReLU(), torch.nn.Conv2d(24, 48, 3, bias=False), torch.nn.ReLU()),
        *(torch.nn.Conv2d(48, 48, 3, groups=48), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(48, 10)),
    )
    graph = trace(network, torch.randn(2, 3, 7, 7))
    widths = graph.full_widths
    return network, GrowthContext(graph, tensors_of(network, graph), widths, widths, seed=0, stage=1)


@pytest.mark.parametrize("rule", RULES)
def test_variance(rule: str) -> None:
    """gain / fan-in or gain / fan-out, receptive field included; the output layer's is 1 / fan-in."""
    network, context = wide()
    for layer in context.graph.layers:
        shape = tuple(network.get_parameter(layer.weight).shape)
        kernel = prod(shape[2:])
        fan_in, fan_out = prod(shape[1:]), (1 if layer.depthwise else shape[0]) * kernel
        hidden = 2 / (fan_out if rule == "hyperfan_out" else fan_in)
        expected = 1 / fan_in if layer.weight == "7.weight" else hidden
        drawn = NewWeights(gain=2.0, rule=rule).draw(context, layer.weight)
        # An emitted weight's scale follows its embedding's: 50 numbers, whose squares have the variance 4/5.
        spread = sqrt(2 / drawn.numel() + (0.8 / 50 if rule != "fan_in" else 0))
        assert tuple(drawn.shape) == shape
        assert abs(float(drawn.square().mean()) / expected - 1) < 5 * spread
        assert abs(float(drawn.mean())) < 5 * sqrt(expected / drawn.numel())


@pytest.mark.parametrize("method", [PairGrowth, RandomGrowth, VarianceTransfer])
def test_as_the_network_draws(method: type) -> None:
    """A layer's variance times its fan-in stays the network's own; norms, biases and layers of zeros keep theirs."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        *(torch.nn.Linear(16, 128), torch.nn.BatchNorm1d(128), torch.nn.ReLU()),
        *(torch.nn.Linear(128, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64), torch.nn.Linear(64, 128)),
    )
    spreads = (0.02, 0.3, 0.0, 0.1)
    with torch.no_grad():
        for layer, spread in zip((network[0], network[3], network[5], network[6]), spreads, strict=True):
            layer.weight.normal_(std=spread)
            layer.bias.fill_(-4.5)
        network[1].weight.fill_(0.5)
    x = torch.randn(8, 16)
    graph, chosen = trace(network, x), method(new_weights="as_network")
    state = make_seed(network, graph, chosen, widths_at(graph, 0.25), seed=0)
    is_last = 2 if method is VarianceTransfer else 1
    for stage in range(2):
        scale = 1 if stage else 4  # full width over the width now
        for number, factor, spread in zip((0, 3, 5, 6), (1, scale, scale, scale**is_last), spreads, strict=True):
            drawn = network[number].weight.detach()[:, -16:]
            assert float(drawn.square().mean()) == pytest.approx(factor * spread**2, rel=0.25)
            assert stage or set(network[number].bias.tolist()) == {-4.5}
        if not stage:
            assert set(network[1].weight.tolist()) == {0.5}
            grow(network, graph, chosen, state, graph.full_widths, 0, (x,))


class Normed(torch.nn.Sequential):
    """Two layers around a normalisation."""

    def __init__(self, norm: torch.nn.Module, dims: int) -> None:
        conv = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[dims - 1]
        super().__init__(conv(3, 8, 1), norm, conv(8, 2, 1))


@pytest.mark.parametrize(
    ("norm", "dims"),
    [
        *((torch.nn.BatchNorm2d, 2), (lambda width: torch.nn.GroupNorm(1, width), 2)),
        (lambda width: torch.nn.GroupNorm(width, width), 2),
        *(
            (lambda width, norm=norm, kept=kept: norm(width, affine=True, track_running_stats=kept), dims)
            for dims, norm in enumerate(
                (torch.nn.InstanceNorm1d, torch.nn.InstanceNorm2d, torch.nn.InstanceNorm3d), start=1
            )
            for kept in (False, True)
        ),
    ],
)
def test_new_channels_of_a_norm_begin_at_its_defaults(norm, dims: int) -> None:
    """Whatever its weights and biases have become."""
    network, x = Normed(norm(8), dims), torch.randn(4, 3, *[4] * dims)
    graph = trace(network, x)
    state = make_seed(network, graph, RandomGrowth(), {"0": 4}, seed=0)
    with torch.no_grad():
        network[1].weight.copy_(torch.tensor([1.5, 1.6, 1.7, 1.8]))
        network[1].bias.copy_(torch.tensor([0.5, 0.6, 0.7, 0.8]))
    grow(network, graph, RandomGrowth(), state, graph.full_widths, 0, (x,))
    assert network[1].weight.tolist() == pytest.approx([1.5, 1.6, 1.7, 1.8, 1, 1, 1, 1])
    assert network[1].bias.tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8, 0, 0, 0, 0])


@pytest.mark.parametrize("method", [PairGrowth, RandomGrowth, VarianceTransfer])
@pytest.mark.parametrize("rule", RULES[1:])
def test_methods_draw_with_it(method: type, rule: str) -> None:
    case, graph = NETWORKS["resnet A"], graph_of("resnet A")
    grown = []
    for new_weights in ("fan_in", rule):
        network, chosen = case.make(), method(new_weights=new_weights)
        state = make_seed(network, graph, chosen, widths_at(graph, 0.5), seed=0)
        roughen(network)
        before = outputs(network, case.inputs(), False)
        event = grow(network, graph, chosen, state, graph.full_widths, 0, (case.inputs(),))
        if chosen.preserves:
            after = outputs(network, case.inputs(), False) * event.output_factor
            torch.testing.assert_close(after, before, rtol=0, atol=1e-10)
        grown.append(network.layers[1][0].conv2.weight)
    assert not torch.equal(*grown)


def test_a_network_without_values_has_no_spread() -> None:
    with torch.device("meta"):
        network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    method = VarianceTransfer(new_weights="as_network")
    with pytest.raises(UserError, match="is on the meta device: build the network on another one"):
        Grower(network, torch.randn(2, 8), method=method, trigger={0: 0.5, 1: 1.0})


def test_a_wrong_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^new_weights must be fan_in, as_network, hyperfan_in or hyperfan_out"):
        PairGrowth(new_weights="fan")


@pytest.mark.parametrize("initialisation", ["constructor", "standard", "mup"])
@pytest.mark.parametrize("multiple", [0.5, 1.0, 2.0])
def test_a_fixed_size_network_is_drawn_as_asked(initialisation: str, multiple: float) -> None:
    """Hidden layers gain / C; output layers 1 / C or, with muP, 1 / C^2 (Yuan et al. 2023, Table 1)."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 40, 3), torch.nn.BatchNorm2d(40), torch.nn.ReLU())
    network += torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(360, 60), torch.nn.Linear(60, 30))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    graph, method = trace(network, torch.randn(2, 3, 5, 5)), FixedSize(multiple, initialisation, gain=3.0)
    widths = {name: round(multiple * group.full_width) for name, group in graph.groups.items()}
    make_seed(network, graph, method, widths, seed=4)
    if initialisation == "constructor" and multiple == 1:
        assert all(torch.equal(before[name], tensor) for name, tensor in network.state_dict().items())
        return
    outputs_in = network[5].in_features
    expected = {
        "0.weight": 3.0 / 27,
        "4.weight": 3.0 / network[4].in_features,
        "5.weight": 1.0 / outputs_in ** (2 if initialisation == "mup" else 1),
    }
    for name, variance in expected.items():
        drawn = network.get_parameter(name).detach()
        assert abs(float(drawn.var()) / variance - 1) < 5 * sqrt(2 / drawn.numel()), name
    assert not any(network.get_parameter(name).any() for name in ("0.bias", "4.bias"))
    with pytest.raises(ValueError, match=r"^initialisation must be constructor, standard or mup"):
        FixedSize(initialisation="He")


def test_large_tensors_are_drawn_in_threads_with_the_same_numbers_for_any_number(monkeypatch: Any) -> None:
    def drawn(rows: int, cpus: int) -> Tensor:
        monkeypatch.setattr(os, "cpu_count", lambda: cpus)
        return normal((rows, 1024), torch.Generator().manual_seed(0))

    large = drawn(5000, cpus=1)
    assert torch.equal(large, drawn(5000, cpus=7))
    first, second = large[:900], large[4096 : 4096 + 900]
    assert abs(float(large.std()) - 1) < 1e-3 and abs(float((first * second).mean())) < 5e-3
    assert torch.equal(drawn(4, 1), torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)))
