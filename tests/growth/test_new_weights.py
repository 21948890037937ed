"""How new weights of ordinary networks are drawn: normally, or as a hypernetwork emits them (hyperfan)."""

from math import prod, sqrt

import pytest
import torch

from growlab.growth import Expansion, NewWeights, PairGrowth, RandomGrowth, VarianceTransfer, grow, plant
from growlab.widths import tensors_of, trace
from tests.cases import NETWORKS, graph_of, outputs, roughen, widths_at

RULES = ("fan_in", "hyperfan_in", "hyperfan_out")


def wide() -> tuple[torch.nn.Module, Expansion]:
    network = torch.nn.Sequential(
        *(
            torch.nn.Conv2d(3, 24, 3),
            torch.nn.ReLU(),
            torch.nn.Conv2d(24, 48, 3, bias=False),
            torch.nn.ReLU(),
        ),
        *(
            torch.nn.Conv2d(48, 48, 3, groups=48),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(48, 10),
        ),
    )
    graph = trace(network, torch.randn(2, 3, 7, 7))
    widths = graph.full_widths
    return network, Expansion(graph, tensors_of(network, graph), widths, widths, seed=0, stage=1)


@pytest.mark.parametrize("rule", RULES)
def test_variance(rule: str) -> None:
    """gain / fan-in or gain / fan-out, receptive field included; the output layer's is 1 / fan-in."""
    network, expansion = wide()
    for layer in expansion.graph.layers:
        shape = tuple(network.get_parameter(layer.weight).shape)
        kernel = prod(shape[2:])
        fan_in, fan_out = prod(shape[1:]), (1 if layer.depthwise else shape[0]) * kernel
        hidden = 2 / (fan_out if rule == "hyperfan_out" else fan_in)
        expected = 1 / fan_in if layer.weight == "7.weight" else hidden
        drawn = NewWeights(gain=2.0, rule=rule).draw(expansion, layer.weight)
        # An emitted weight's scale follows its embedding's: 50 numbers, whose squares have the variance 4/5.
        spread = sqrt(2 / drawn.numel() + (0.8 / 50 if rule != "fan_in" else 0))
        assert tuple(drawn.shape) == shape
        assert abs(float(drawn.square().mean()) / expected - 1) < 5 * spread
        assert abs(float(drawn.mean())) < 5 * sqrt(expected / drawn.numel())


@pytest.mark.parametrize("method", [PairGrowth, RandomGrowth, VarianceTransfer])
@pytest.mark.parametrize("rule", RULES[1:])
def test_methods_draw_with_it(method: type, rule: str) -> None:
    case, graph = NETWORKS["resnet A"], graph_of("resnet A")
    grown = []
    for new_weights in ("fan_in", rule):
        network, chosen = case.make(), method(new_weights=new_weights)
        state = plant(network, graph, chosen, widths_at(graph, 0.5), seed=0)
        roughen(network)
        before = outputs(network, case.inputs(), False)
        event = grow(network, graph, chosen, state, graph.full_widths, 0, (case.inputs(),))
        if chosen.preserves:
            after = outputs(network, case.inputs(), False) * event.output_factor
            torch.testing.assert_close(after, before, rtol=0, atol=1e-10)
        grown.append(network.layers[1][0].conv2.weight)
    assert not torch.equal(*grown)


def test_a_wrong_rule_is_refused() -> None:
    with pytest.raises(ValueError, match=r"growth\.new_weights must be fan_in, hyperfan_in, hyperfan_out"):
        PairGrowth(new_weights="fan")
