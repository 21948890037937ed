"""Running statistics of new channels of batch and instance normalisation."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base import ranks
from growlab.growth import Net2Net, PairGrowth, VarianceTransfer, grow, make_seed
from growlab.growth.state import GrowthState
from growlab.widths import tensors_of, trace
from tests.cases import Around
from tests.command_line import CommandLine


class Products(nn.Module):
    """Blocks that multiply what two layers put out: unless normalised, channels get larger from block to block."""

    def __init__(self, depth: int = 1, width: int = 8, shared: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = nn.Linear(5, width), nn.BatchNorm1d(width)
        self.one, self.other, self.out, self.norms = (nn.ModuleList() for _ in range(4))
        for _ in range(depth):
            self.one.append(nn.Linear(width, 2 * width))
            self.other.append(nn.Linear(width, 2 * width))
            self.out.append(nn.Linear(2 * width, width))
            self.norms.append(self.norms[0] if shared and self.norms else nn.BatchNorm1d(width))
        self.classifier = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        for one, other, out, norm in zip(self.one, self.other, self.out, self.norms, strict=True):
            x = x + norm(out(F.relu6(one(x)) * other(x)))
        return self.classifier(x)


def batch(seed: int = 0, rows: int = 32) -> Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(seed))


def seed_network(make=Products, method=None):
    """A planted network whose running averages have found its channels."""
    torch.manual_seed(0)
    network = make()
    graph = trace(network, batch())
    widths = {name: group.full_width // 2 for name, group in graph.groups.items()}
    state = make_seed(network, graph, method or PairGrowth(), widths, seed=0)
    with torch.no_grad():
        for _ in range(60):
            network(batch())
    return network, graph, state


def moments(network: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance of what enters each batch normalisation in train mode, by torch's own running averages."""
    other = copy.deepcopy(network).train()
    norms = {name: m for name, m in other.named_modules() if isinstance(m, nn.BatchNorm1d)}
    for norm in norms.values():
        norm.reset_running_stats()
        norm.momentum = None
    with torch.no_grad():
        other(x)
    return {name: (m.running_mean, m.running_var) for name, m in norms.items()}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("method", [PairGrowth(noise_std=0.0), VarianceTransfer(noise_std=0.0)])
def test_new_channels_begin_with_the_statistics_of_the_batch(method, shared):
    network, graph, state = seed_network(lambda: Products(2, shared=shared), method)
    before = {name: tensor.clone() for name, tensor in network.named_buffers()}
    event = grow(network, graph, method, state, graph.full_widths, 0, batch(1))
    expected = moments(network, batch(1))
    for norm in graph.norms:
        module = network.get_submodule(norm.name)
        for kind, moment in zip(("running_mean", "running_var"), expected[norm.name], strict=True):
            got = getattr(module, kind)
            torch.testing.assert_close(got[4:], moment[4:], rtol=1e-5, atol=1e-6)
            old = before[f"{norm.name}.{kind}"]
            assert torch.equal(got[:4], old) or method.name != "pairs"
            assert got.shape == (8,) and not torch.equal(got[4:6], moment[:2])
        # Of a pair both have the same.
        assert torch.equal(module.running_var[4:6], module.running_var[6:8])
    assert event.parity_error_eval < 1e-5


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_new_channels_of_instance_normalisation_begin_with_statistics_of_samples(dims):
    """Means over the samples, as torch's own running averages have them."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1](8, track_running_stats=True)
    network = nn.Sequential(conv(3, 8, 2), norm, conv(8, 2, 1)).double()
    x = torch.randn(4, 3, *[4] * dims, dtype=torch.float64) * torch.arange(1, 5).view(4, *[1] * (dims + 1))
    graph, method = trace(network, x), PairGrowth()
    state = make_seed(network, graph, method, {"0": 4}, seed=0)
    before = norm.running_var.clone()
    grow(network, graph, method, state, graph.full_widths, 0, x)
    seen = copy.deepcopy(norm).train()
    seen.reset_running_stats()
    seen.momentum = 1.0
    seen(network[0](x))
    for kind in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norm, kind)[4:], getattr(seen, kind)[4:])
    assert torch.equal(norm.running_var[:4], before) and not torch.equal(norm.running_var[4:], before)
    assert torch.equal(norm.running_mean[:4], torch.zeros_like(before))


def test_statistics_of_a_sample_without_a_batch():
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.InstanceNorm2d(8, track_running_stats=True)).double()
    network.append(nn.Conv2d(8, 2, 1).double())
    x = torch.randn(3, 8, 5, dtype=torch.float64)
    graph = trace(network, x)
    state = make_seed(network, graph, PairGrowth(), {"0": 4}, seed=0)
    grow(network, graph, PairGrowth(), state, graph.full_widths, 0, x)
    torch.testing.assert_close(network[1].running_mean[4:], network[0](x).mean((1, 2))[4:])


def test_copies_keep_the_statistics_of_their_sources():
    network, graph, state = seed_network(method=Net2Net())
    before = network.norm.running_var.clone()
    event = grow(network, graph, Net2Net(), state, graph.full_widths, 0, batch(1))
    (group,) = graph.axes["norm.running_var"][0].groups
    assert torch.equal(network.norm.running_var, before[event.carry.sources[group]])


def test_a_deep_network_of_products_grows_in_float32():
    """At mean 0 and variance 1 its new channels reach 10^6 in eval mode, and what cancels leaves rounding."""
    network, graph, state = seed_network(lambda: Products(12))
    event = grow(network, graph, PairGrowth(), state, graph.full_widths, 0, batch(1))
    assert event.parity_error_eval < 1e-4
    largest: list[float] = []
    for norm in (network.norm, *network.norms):
        norm.register_forward_hook(lambda *a: largest.append(float(a[-1].detach().abs().max())))
    network.eval()(batch(1))
    assert max(largest) < 20


def test_an_average_takes_the_statistics_of_the_network_that_it_follows():
    method = PairGrowth(noise_std=0.0)
    network, graph, state = seed_network(method=method)
    mean = copy.deepcopy(network)
    with torch.no_grad():
        for parameter in mean.parameters():
            parameter.add_(0.1)
    own, leader = GrowthState.from_dict(state.as_dict()), tensors_of(network, graph)
    event = grow(network, graph, method, state, graph.full_widths, 0, batch(1))
    grow(mean, graph, method, own, graph.full_widths, 0, batch(2), averaged=leader, averaged_event=event)
    for name, buffer in network.named_buffers():
        assert torch.equal(mean.get_buffer(name), buffer), name


def one_rank(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    network, graph, state = seed_network()
    probes = [batch(1 + other, 8) for other in range(2)]
    arguments = (network, graph, PairGrowth(noise_std=0.0), state, graph.full_widths, 0, probes[rank])
    grow(*arguments, agree=ranks.agreed, average=ranks.averaged)
    seen = [moments(network, probe) for probe in probes]
    for name in ("norm", "norms.0"):
        got = network.get_submodule(name).running_var[4:]
        torch.testing.assert_close(got, (seen[0][name][1][4:] + seen[1][name][1][4:]) / 2)
    torch.save(network.state_dict(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_that_see_different_batches_hold_the_same_statistics(cli: CommandLine, tmp_path: Path):
    cli.on_two_ranks(one_rank, tmp_path)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", [PairGrowth(), VarianceTransfer()])
@pytest.mark.parametrize("inputs", [5, 8])
def test_statistics_are_those_of_the_functions_input_not_of_its_modules(inputs, method):
    inside = Around(
        lambda net, x: F.batch_norm(net.layer(x), net.running_mean, net.running_var, training=net.training),
        **{"layer": [inputs, 8], "running_mean": nn.Buffer(torch.zeros(8)), "running_var": nn.Buffer(torch.ones(8))},
    )
    network = nn.Sequential(nn.Linear(5, inputs), inside, nn.ReLU(), nn.Linear(8, 3))
    graph = trace(network, batch())
    widths = {name: group.full_width // 2 for name, group in graph.groups.items()}
    state = make_seed(network, graph, method, widths, seed=0)
    event = grow(network, graph, method, state, graph.full_widths, 0, batch(1))
    assert event.parity_error_eval < 1e-5
    seen = []
    hook = network[1].layer.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    network(batch(1))
    hook.remove()
    torch.testing.assert_close(network[1].running_var[4:], seen[0].var(0)[4:])
    torch.testing.assert_close(network[1].running_mean[4:], seen[0].mean(0)[4:])
