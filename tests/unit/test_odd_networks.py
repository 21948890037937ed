"""Networks of all kinds grow twice while they train: exactly, with the right variances, losing no state."""

import math
from collections.abc import Collection, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils._pytree import tree_leaves

from growlab.grower import Grower
from growlab.growth import GrowthEvent, VarianceTransfer
from growlab.growth.outputs import without_side_effects
from growlab.optim import SGD
from growlab.widths import WidthGraph
from tests.cases import roughen, tracked
from tests.odd_networks import ODD_NETWORKS

STAGES = {0: 1 / 3, 1: 1 / 2, 2: 1.0}
STEPS = 2
GAIN = 2.0
# Tolerance of sample variances, in standard deviations.
SIGMAS = 4.0


def computed(network: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Outputs in eval mode, and in train mode with random draws replaced by their means."""
    found = []
    for training in (False, True):
        with without_side_effects(network) as draws:
            draws.means = training
            found += tree_leaves(network.train(training)(*inputs))
    return found


def gradients(network: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """Gradients of a loss in eval mode, by name; the parameters keep them too."""
    network.zero_grad()
    with without_side_effects(network), torch.enable_grad():
        outputs = [out for out in tree_leaves(network.eval()(*inputs)) if out.is_floating_point()]
        torch.manual_seed(0)
        sum((out * torch.randn_like(out)).sum() for out in outputs).backward()
        found = {p: p.grad for p in network.parameters() if p.grad is not None}
    for parameter, gradient in found.items():
        parameter.grad = gradient
    return {name: found[p].detach().clone() for name, p in network.named_parameters() if p in found}


def check_carried(network: nn.Module, graph: WidthGraph, inputs: tuple[Tensor, ...]) -> None:
    """Check that carried accumulated gradients equal the grown network's own, except in new channels.

    Gradients of v in a weight g v / |v| may differ along the old part of v.
    """
    carried = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
    for name, now in gradients(network, inputs).items():
        known = carried[name] != 0
        if name in graph.weight_norms:
            old = network.get_parameter(name).detach() * known
            dims = [dim for dim in range(old.dim()) if dim != graph.weight_norms[name][1]]
            square = old.square().sum(dims, keepdim=True).clamp(min=1e-9)
            now = now + old * ((carried[name] - now) * old).sum(dims, keepdim=True) / square
        assert (carried[name] - now)[known].norm() <= 1e-6 * (now.norm() + 1.0), name


def error(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest difference, relative to each output's largest entry."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(after, before, strict=True))


def train(network: nn.Module, optimizer: Optimizer, inputs: tuple[Tensor, ...]) -> list[float]:
    """Train for some steps; return the loss before and after each, with random draws replaced by their means."""
    network.train()
    losses = []
    for step in range(STEPS + 1):
        with without_side_effects(network) as draws:
            draws.means = True
            losses.append(float(sum((out - 0.5).square().mean() for out in tree_leaves(network(*inputs)))))
        if step < STEPS:
            optimizer.zero_grad()
            sum((output - 0.5).square().mean() for output in tree_leaves(network(*inputs))).backward()
            optimizer.step()
    return losses


def check_tracked(network: nn.Module, optimizer: Optimizer, moments: tuple[str, ...]) -> None:
    """Check that the optimizer has each parameter once and no others, and moments of their shapes."""
    assert sorted(tracked(optimizer)) == sorted(id(p) for p in network.parameters())
    assert {id(p) for p in optimizer.state} <= set(tracked(optimizer))
    for name, parameter in network.named_parameters():
        if parameter.grad is not None:
            assert parameter.grad.shape == parameter.shape, name
            for moment in moments:
                assert optimizer.state[parameter][moment].shape == parameter.shape, (name, moment)


def check_variances(
    graph: WidthGraph,
    last_layers: Collection[str],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    event: GrowthEvent,
) -> tuple[float, int]:
    """Check Table 1: the factor on old weights and the variance of new ones.

    Returns:
        Sum of the squares of drawn weights, each over its variance, and their number.
    """
    total, count = 0.0, 0
    for layer in {layer.weight: layer for layer in graph.layers}.values():
        if not graph.changes(layer.weight, event.widths_before, event.widths_after):
            continue
        old, new = before[layer.weight], after[layer.weight].detach()
        fans = [graph.fan_in(layer, widths) for widths in (event.widths_before, event.widths_after)]
        last = layer.name in last_layers
        kept = torch.meshgrid(
            *(axis.kept(event.widths_before, event.widths_after) for axis in graph.axes[layer.weight]), indexing="ij"
        )
        ratio = float((new[kept] * old).sum() / old.square().sum())
        assert torch.allclose(new[kept], ratio * old, rtol=1e-12, atol=0), layer.weight
        expected = fans[0] / fans[1] if last else math.sqrt(fans[0] / fans[1])
        # The scale of v in a weight g v / |v| is arbitrary, so it is not rescaled.
        expected = 1.0 if layer.weight in graph.weight_norms else expected
        assert ratio == pytest.approx(expected, rel=1e-12), layer.weight
        rescaled = event.report.get("rescaled", {}).get(layer.weight, 1.0)
        assert rescaled == pytest.approx(expected, rel=1e-12), layer.weight
        drawn = torch.ones_like(new, dtype=torch.bool)
        drawn[kept] = False
        # Twins have equal values, which count once. Zeros are outgoing weights of channels without a twin.
        values = new[drawn].abs().unique()
        values = values[values > 0]
        variance = 1 / fans[1] ** 2 if last else GAIN * layer.variance_per_entry / fans[1]
        if len(values) >= 30:
            deviation = math.sqrt(2 / len(values))
            assert float(values.square().mean() / variance) == pytest.approx(1, abs=SIGMAS * deviation), layer.weight
        total, count = total + float(values.square().sum() / variance), count + len(values)
    return total, count


# torch warns once about its own encoder, in whichever test comes first.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ODD_NETWORKS)
def test_grows_twice(name: str) -> None:
    case = ODD_NETWORKS[name]
    inputs = case.inputs
    torch.manual_seed(0)
    network = case.make().double()
    full = {key: tensor.shape for key, tensor in network.state_dict().items()}
    grower = Grower(
        network, inputs, method=VarianceTransfer(gain=GAIN, multipliers="keep"), trigger=STAGES, anneal_steps=STEPS
    )
    found = grower.full_graph.full_widths
    assert found and found == (case.groups or found)
    if name == "norms_of_two_streams_in_one_forward":
        reason = "the network normalises several streams of channels"
        assert grower.full_graph.fixed["a"] == grower.full_graph.fixed["b"] == reason
    adaptive = list(ODD_NETWORKS).index(name) % 3 == 0
    optimizer: Optimizer = (
        AdamW(network.parameters(), lr=1e-2, weight_decay=0.1)
        if adaptive
        else SGD(network.parameters(), lr=2e-3, momentum=0.9)
    )
    moments = ("exp_avg", "exp_avg_sq") if adaptive else ("momentum_buffer",)
    grower.follow(optimizer, state="inherit")
    losses = train(network, optimizer, inputs)
    total, count = 0.0, 0
    for stage in (1, 2):
        expected = computed(network, inputs)
        before = {key: p.detach().clone() for key, p in network.named_parameters()}
        learning = gradients(network, inputs).keys()
        (event,) = grower.step(epoch=stage)
        assert learning == {key for key, p in network.named_parameters() if p.grad is not None}
        check_carried(network, grower.graph, inputs)
        assert error(expected, computed(network, inputs)) <= 1e-10
        assert max(event.parity_error_eval, event.parity_error_train) <= 1e-10
        one, more = check_variances(grower.graph, case.last, before, dict(network.named_parameters()), event)
        total, count = total + one, count + more
        check_tracked(network, optimizer, moments)
        losses += train(network, optimizer, inputs)
        check_tracked(network, optimizer, moments)
    assert count >= 30 and total / count == pytest.approx(1, abs=SIGMAS * math.sqrt(2 / count))
    assert min(losses) < losses[0]
    expected = computed(network, inputs)
    assert grower.finish() is network
    state = network.state_dict()
    assert {key: tensor.shape for key, tensor in state.items()} == full
    roughen(plain := case.make().double())
    plain.load_state_dict(state, strict=True)
    assert error(expected, computed(network, inputs)) <= 1e-10
    assert error(expected, computed(plain, inputs)) <= 1e-10
