"""Carrying a gradient and its moments to the grown network equals computing them on the grown network."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from growlab.growth import HyperCloning, Lemon, Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.optim import LARS, follow
from growlab.widths import Carry, trace


class Everything(nn.Module):
    """Convolution, depthwise convolution, batch norm, a residual stream, flattening, linear layers with biases."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.pointwise, self.norm3 = nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8)
        self.hidden, self.classifier = nn.Linear(32, 10), nn.Linear(10, 4)

    def forward(self, x):
        x = F.relu(self.norm1(self.stem(x)))
        y = F.relu(self.norm2(self.depthwise(x)))
        x = F.relu(x + self.norm3(self.pointwise(y)))
        return self.classifier(F.relu(self.hidden(F.max_pool2d(x, 2).flatten(1))))


FULL = Everything()
GRAPH = trace(FULL, torch.randn(2, 3, 4, 4))
BEFORE = {name: group.full_width // 2 for name, group in GRAPH.groups.items()}
AFTER = {name: group.full_width for name, group in GRAPH.groups.items()}
BETAS = (0.9, 0.99)


def grown(method, seed=0):
    """The network before, after, the event and the state."""
    torch.manual_seed(0)
    network = Everything()
    state = make_seed(network, GRAPH, method, BEFORE, seed=1)
    network.double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        for _ in range(20):
            network(torch.randn(16, 3, 4, 4).double())
    small = copy.deepcopy(network)
    event = grow(network, GRAPH, method, state, AFTER, seed, (torch.randn(8, 3, 4, 4).double(),))
    return small, network, event, state


def moments(network, factor=1.0, training=False):
    """Gradient of the last batch, momentum, and Adam's moments of a few batches, by name, at fixed weights."""
    network.train(training)
    source = torch.Generator().manual_seed(3)
    gradient = {name: torch.zeros_like(p) for name, p in network.named_parameters()}
    momentum, mean, square = (copy.deepcopy(gradient) for _ in range(3))
    for _ in range(4):
        x = torch.randn(8, 3, 4, 4, generator=source).double()
        y = torch.randint(4, (8,), generator=source)
        network.zero_grad()
        (F.cross_entropy(network(x) * factor, y)).backward()
        for name, parameter in network.named_parameters():
            gradient[name] = parameter.grad.clone()
            momentum[name].mul_(0.9).add_(parameter.grad)
            mean[name].lerp_(parameter.grad, 1 - BETAS[0])
            square[name].mul_(BETAS[1]).addcmul_(parameter.grad, parameter.grad, value=1 - BETAS[1])
    return {"gradient": (gradient, 1), "momentum": (momentum, 1), "mean": (mean, 1), "square": (square, 2)}


def carried(event, name, tensor, power):
    return event.carry.carried(tensor, name, GRAPH, BEFORE, AFTER, power)


def old_entries(name):
    """Mask of the entries that were there before."""
    ones = torch.ones(GRAPH.shape(name, BEFORE))

    return Carry().carried(ones, name, GRAPH, BEFORE, AFTER, 0).bool()


class Halving(PairGrowth):
    """Pairs that halve the logits through the head alone."""

    def __init__(self, output_multiplier: bool) -> None:
        super().__init__()
        self.output_multiplier = output_multiplier

    def grow(self, context):
        growth = super().grow(context)
        halved = {name: growth.tensors[name] / 2 for name in ("classifier.weight", "classifier.bias")}
        carry = replace(growth.carry, scales=dict.fromkeys(halved, 2.0))
        return replace(growth, tensors={**growth.tensors, **halved}, output_factor=2.0, carry=carry)


BATCH = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(4)).double()
LABELS = torch.tensor([0, 0, 1, 0, 2, 0, 3, 0])


def gradients(network, loss):
    """Gradients of the loss of the batch's logits, by parameter name."""
    named = dict(network.named_parameters())
    return dict(zip(named, torch.autograd.grad(loss(network(BATCH)), list(named.values())), strict=True))


def trained(method, logits=1.0):
    """A seed network, its state and an optimizer that has one gradient in its moments, at unchanged weights."""
    torch.manual_seed(0)
    network = Everything()
    state = make_seed(network, GRAPH, method, BEFORE, seed=1)
    network.double().eval()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(6)))
        network.classifier.weight.mul_(logits)
        network.classifier.bias.mul_(logits)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.0)
    F.cross_entropy(network(BATCH), LABELS).backward()
    optimizer.step()
    return network, state, optimizer


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("method", [Net2Net(), HyperCloning(), HyperCloning("diagonal"), Lemon()], ids=lambda m: m.name)
def test_gradient_and_moments_of_copies_follow_exactly_at_every_entry(method, training):
    small, large, event, _ = grown(method)
    before, after = moments(small, training=training), moments(large, training=training)
    for what, (tensors, power) in before.items():
        for name, tensor in tensors.items():
            expected = after[what][0][name]
            got = carried(event, name, tensor, power)
            torch.testing.assert_close(got, expected, rtol=1e-8, atol=1e-12, msg=f"{what} of {name}")


def larss_momentum(network, batches):
    """V of LARS after so many batches, at weights that hardly move."""
    optimizer = LARS(network.parameters(), lr=1e-14, momentum=0.9)
    for _, gradient in zip(range(batches), some_gradients(network), strict=False):
        for name, parameter in network.named_parameters():
            parameter.grad = gradient[name]
        optimizer.step()
    return optimizer


def some_gradients(network):
    """Gradients of batches, one after the other, by parameter name."""
    network.eval()
    source = torch.Generator().manual_seed(3)
    while True:
        x, y = torch.randn(8, 3, 4, 4, generator=source).double(), torch.randint(4, (8,), generator=source)
        network.zero_grad()
        F.cross_entropy(network(x), y).backward()
        yield {name: parameter.grad.clone() for name, parameter in network.named_parameters()}


@pytest.mark.parametrize(
    "method, batches", [(Net2Net(), 1), (HyperCloning(), 4), (HyperCloning("diagonal"), 4), (Lemon(), 1)]
)
def test_larss_momentum_is_as_long_as_the_grown_weights_make_it(method, batches):
    """Beside gradients it holds the rates of its layers, which are their weights' norms over their gradients'."""
    small, large, event, _ = grown(method)
    optimizer, expected = larss_momentum(small, batches), larss_momentum(large, batches)
    named = dict(small.named_parameters())
    pairs = {name: (p, event.replaced[name][1]) for name, p in named.items() if name in event.replaced}
    follow(optimizer, pairs, GRAPH, BEFORE, AFTER, "inherit", event.carry)
    for name, parameter in large.named_parameters():
        followed = parameter if name in pairs else named[name]
        torch.testing.assert_close(
            optimizer.state[followed]["momentum_buffer"],
            expected.state[parameter]["momentum_buffer"],
            rtol=1e-7,
            atol=1e-24,
            msg=lambda told, name=name: f"{name}: {told}",
        )


@pytest.mark.parametrize("training", [False, True])
def test_pairs_keep_the_gradient_and_moments_of_old_entries(training):
    small, large, event, _ = grown(PairGrowth(noise_std=0.0))
    before, after = moments(small, training=training), moments(large, training=training)
    for what, (tensors, power) in before.items():
        for name, tensor in tensors.items():
            got, expected, old = carried(event, name, tensor, power), after[what][0][name], old_entries(name)
            torch.testing.assert_close(got[old], expected[old], rtol=1e-8, atol=1e-12, msg=f"{what} of {name}")
            assert (got[~old] == 0).all(), f"{what} of {name}: new entries start at zero"


def test_variance_transfer_divides_gradients_by_the_scale_of_the_weights():
    """Exact in eval mode; in train mode up to batch normalisation's eps."""
    small, large, event, state = grown(VarianceTransfer(noise_std=0.0))
    assert state.multipliers
    scaled = {name for name in event.carry.scales if not torch.as_tensor(event.carry.scales[name] == 1).all()}
    assert {"depthwise.weight", "pointwise.weight", "hidden.weight", "classifier.weight"} & scaled
    for training, tolerance in ((False, 1e-8), (True, 1e-3)):
        before = moments(small, training=training)
        after = moments(large, state.output_factor, training)
        for what, (tensors, power) in before.items():
            for name, tensor in tensors.items():
                got, expected, old = (carried(event, name, tensor, power), after[what][0][name], old_entries(name))
                error = (got[old] - expected[old]).norm() / (expected[old].norm() + 1e-9)
                assert error < tolerance, f"{what} of {name} (training={training}): {error:.1e}"


def test_variance_transfer_by_the_constraint_divides_by_the_measured_scale():
    small, large, event, state = grown(VarianceTransfer(rule="constraint", noise_std=0.0))
    before, after = moments(small)["gradient"][0], moments(large, state.output_factor)["gradient"][0]
    for name, tensor in before.items():
        old = old_entries(name)
        torch.testing.assert_close(
            carried(event, name, tensor, 1)[old], after[name][old], rtol=1e-7, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("method", [VarianceTransfer, Halving], ids=lambda m: m.__name__)
def test_without_the_multiplier_all_state_follows_the_logits_that_shrink(method):
    """Exact where the loss is linear in the logits, for parameters too that the event leaves alone."""
    network, state, optimizer = trained(method(output_multiplier=False))
    small = copy.deepcopy(network)
    event = grow(network, GRAPH, method(output_multiplier=False), state, AFTER, 0, (BATCH,))
    assert state.output_factor == 1.0 != event.output_factor
    follow(optimizer, event.replaced, GRAPH, BEFORE, AFTER, carry=event.carry)
    assert any(a is b for a in network.parameters() for b in optimizer.state if b.shape == (4,))
    weight = torch.randn(4, generator=torch.Generator().manual_seed(5)).double()
    for training, tolerance in ((False, 1e-9), (True, 1e-3)):
        before = gradients(small.train(training), lambda z: (z * weight).sum())
        after = gradients(network.train(training), lambda z: (z * weight).sum())
        for name, gradient in before.items():
            old = old_entries(name)
            for power in (1, 2):
                got, expected = carried(event, name, gradient**power, power)[old], after[name][old] ** power
                error = (got - expected).norm() / (expected.norm() + 1e-9)
                assert error < tolerance, f"{name}, power {power}, training={training}: {error:.1e}"


def test_channels_that_come_behind_an_event_have_no_gradient() -> None:
    carry = Carry({"a": torch.tensor([0, 1, 0])}, {"a": torch.tensor([0.5, 1.0, 0.5])}, {}, {"b": torch.eye(2)})
    longer = carry.extended({"a": 5, "b": 3, "c": 7})
    assert longer.sources["a"].tolist() == [0, 1, 0, -1, -1]
    assert longer.rows["a"].tolist() == [0.5, 1.0, 0.5, 1.0, 1.0]
    assert longer.bases["b"].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("power", [0, 1, 2])
def test_channels_without_sources_are_carried_as_those_that_name_their_own(power: int) -> None:
    """Blocks are copied at once where no channel takes over another's gradient; several parts of an axis too."""
    rows = {name: 1.0 + torch.rand(width) for name, width in AFTER.items()}
    kept = {name: torch.arange(width) for name, width in AFTER.items()}
    named = {name: torch.where(kept[name] < BEFORE[name], kept[name], -1) for name in kept}
    for name, axes in GRAPH.axes.items():
        old = torch.randn([axis.length(BEFORE) for axis in axes], dtype=torch.float64)
        scales = {name: 0.5}
        ours = Carry(rows=rows, scales=scales, every=3.0).carried(old, name, GRAPH, BEFORE, AFTER, power)
        theirs = Carry(named, rows, scales, every=3.0).carried(old, name, GRAPH, BEFORE, AFTER, power)
        assert torch.equal(ours, theirs) and ours.data_ptr() != old.data_ptr()
