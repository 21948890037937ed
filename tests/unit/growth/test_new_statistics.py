"""New entries: running statistics of normalisations, and weights drawn normally or by hyperfan initialisation."""

import copy
import os
from math import prod, sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab import Grower
from growlab.base import ranks
from growlab.base.errors import UserError
from growlab.growth import (
    FixedSize,
    GrowthContext,
    NewWeights,
    PairGrowth,
    RandomGrowth,
    VarianceTransfer,
    make_seed,
)
from growlab.growth.method import normal
from growlab.widths import tensors_of, trace
from tests.cases import Around, Growing, differing, planted
from tests.command_line import CommandLine


class Products(nn.Module):
    """Blocks that multiply the outputs of two layers: without norms, channels grow larger from block to block."""

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


def settled(make=Products, method=None) -> Growing:
    """A half-width network whose running averages have converged."""
    torch.manual_seed(0)
    run = Growing(make(), batch(), method or PairGrowth(), rough=False)
    with torch.no_grad():
        for _ in range(60):
            run.network(batch())
    run.x = (batch(1),)
    return run


def moments(network: nn.Module, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance of each batch normalisation's input in train mode, by torch's own running averages."""
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
    run = settled(lambda: Products(2, shared=shared), method)
    before = {name: tensor.clone() for name, tensor in run.network.named_buffers()}
    event = run.grow()
    expected = moments(run.network, batch(1))
    for norm in run.graph.norms:
        module = run.network.get_submodule(norm.name)
        for kind, moment in zip(("running_mean", "running_var"), expected[norm.name], strict=True):
            got = getattr(module, kind)
            torch.testing.assert_close(got[4:], moment[4:], rtol=1e-5, atol=1e-6)
            old = before[f"{norm.name}.{kind}"]
            assert torch.equal(got[:4], old) or method.name != "pairs"
            assert got.shape == (8,) and not torch.equal(got[4:6], moment[:2])
        # Both channels of a pair have the same statistics.
        assert torch.equal(module.running_var[4:6], module.running_var[6:8])
    assert event.parity_error_eval < 1e-5


@pytest.mark.parametrize(("dims", "batched"), [(1, True), (2, True), (2, False), (3, True)])
def test_new_channels_of_instance_normalisation_begin_with_statistics_of_samples(dims, batched):
    """Means over the samples, as in torch's own running averages; an unbatched sample's own statistics."""
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1](8, track_running_stats=True)
    network = nn.Sequential(conv(3, 8, 2), norm, conv(8, 2, 1)).double()
    x = torch.randn(4, 3, *[4] * dims, dtype=torch.float64) * torch.arange(1, 5).view(4, *[1] * (dims + 1))
    x = x if batched else x[0]
    run = Growing(network, x, PairGrowth(), rough=False)
    before = norm.running_var.clone()
    run.grow()
    seen = copy.deepcopy(norm).train()
    seen.reset_running_stats()
    seen.momentum = 1.0
    seen(network[0](x))
    for kind in ("running_mean", "running_var"):
        torch.testing.assert_close(getattr(norm, kind)[4:], getattr(seen, kind)[4:])
    assert torch.equal(norm.running_var[:4], before) and not torch.equal(norm.running_var[4:], before)
    assert torch.equal(norm.running_mean[:4], torch.zeros_like(before))


def test_a_deep_network_of_products_grows_in_float32():
    """With mean 0 and variance 1, new channels would reach 10^6 in eval mode, and their pairs cancel inexactly."""
    run = settled(lambda: Products(12))
    assert run.grow().parity_error_eval < 1e-4
    largest: list[float] = []
    for norm in (run.network.norm, *run.network.norms):
        norm.register_forward_hook(lambda *a: largest.append(float(a[-1].detach().abs().max())))
    run.network.eval()(batch(1))
    assert max(largest) < 20


def test_an_average_takes_the_statistics_of_the_network_that_it_follows():
    run = settled(method=PairGrowth(noise_std=0.0))
    mean, leader = copy.deepcopy(run), tensors_of(run.network, run.graph)
    with torch.no_grad():
        for parameter in mean.network.parameters():
            parameter.add_(0.1)
    mean.x = (batch(2),)
    mean.grow(averaged=leader, averaged_event=run.grow())
    assert not differing(dict(run.network.named_buffers()), dict(mean.network.named_buffers()))


def one_rank(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    run = settled(method=PairGrowth(noise_std=0.0))
    probes = [batch(1 + other, 8) for other in range(2)]
    run.x = (probes[rank],)
    run.grow(agree=ranks.agreed, average=ranks.averaged)
    seen = [moments(run.network, probe) for probe in probes]
    for name in ("norm", "norms.0"):
        got = run.network.get_submodule(name).running_var[4:]
        torch.testing.assert_close(got, (seen[0][name][1][4:] + seen[1][name][1][4:]) / 2)
    torch.save(run.network.state_dict(), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_ranks_that_see_different_batches_hold_the_same_statistics(cli: CommandLine, tmp_path: Path):
    cli.on_two_ranks(one_rank, tmp_path)
    assert not differing(*(torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)))


@pytest.mark.parametrize("method", [PairGrowth(), VarianceTransfer()])
@pytest.mark.parametrize(("inputs", "draws"), [(5, False), (8, False), (8, True)])
def test_statistics_are_those_of_the_functions_input_not_of_its_modules(inputs, draws, method):
    inside = Around(
        lambda net, x: F.batch_norm(net.layer(x), net.running_mean, net.running_var, training=net.training),
        **{"layer": [inputs, 8], "running_mean": nn.Buffer(torch.zeros(8)), "running_var": nn.Buffer(torch.ones(8))},
    )
    noise = Around(lambda net, x: x + torch.randn_like(x) if net.training else x) if draws else nn.Identity()
    network = nn.Sequential(nn.Linear(5, inputs), inside, noise, nn.ReLU(), nn.Linear(8, 3))
    run = Growing(network, batch(), method, rough=False)
    run.x = (batch(1),)
    assert run.grow().parity_error_eval < 1e-5
    seen = []
    hook = network[1].layer.register_forward_hook(lambda module, given, out: seen.append(out.detach()))
    network(batch(1))
    hook.remove()
    torch.testing.assert_close(network[1].running_var[4:], seen[0].var(0)[4:])
    torch.testing.assert_close(network[1].running_mean[4:], seen[0].mean(0)[4:])


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
    """The variance is gain / fan-in or gain / fan-out, receptive field included; the output layer's is 1 / fan-in."""
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
def test_as_network_keeps_each_layers_own_variance(method: type) -> None:
    """Variance times fan-in is preserved; norms, biases and layers of zeros keep their values."""
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
    run = Growing(network, torch.randn(8, 16), method(new_weights="as_network"), 0.25, rough=False)
    is_last = 2 if method is VarianceTransfer else 1
    for stage in range(2):
        scale = 1 if stage else 4  # full width over the width now
        for number, factor, spread in zip((0, 3, 5, 6), (1, scale, scale, scale**is_last), spreads, strict=True):
            drawn = network[number].weight.detach()[:, -16:]
            assert float(drawn.square().mean()) == pytest.approx(factor * spread**2, rel=0.25)
            assert stage or set(network[number].bias.tolist()) == {-4.5}
        if not stage:
            assert set(network[1].weight.tolist()) == {0.5}
            run.grow()


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
    """Regardless of its current weights and biases."""
    conv = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)[dims - 1]
    network = torch.nn.Sequential(conv(3, 8, 1), norm(8), conv(8, 2, 1))
    run = Growing(network, torch.randn(4, 3, *[4] * dims), RandomGrowth(), {"0": 4}, rough=False)
    with torch.no_grad():
        network[1].weight.copy_(torch.tensor([1.5, 1.6, 1.7, 1.8]))
        network[1].bias.copy_(torch.tensor([0.5, 0.6, 0.7, 0.8]))
    run.grow()
    assert network[1].weight.tolist() == pytest.approx([1.5, 1.6, 1.7, 1.8, 1, 1, 1, 1])
    assert network[1].bias.tolist() == pytest.approx([0.5, 0.6, 0.7, 0.8, 0, 0, 0, 0])


@pytest.mark.parametrize("method", [PairGrowth, RandomGrowth, VarianceTransfer])
@pytest.mark.parametrize("rule", RULES[1:])
def test_methods_draw_new_weights_by_the_rule(method: type, rule: str) -> None:
    grown = []
    for new_weights in ("fan_in", rule):
        run = planted("resnet A", method(new_weights=new_weights))
        before = run.outputs()
        event = run.grow()
        if run.method.preserves:
            torch.testing.assert_close(run.outputs() * event.output_factor, before, rtol=0, atol=1e-10)
        grown.append(run.network.layers[1][0].conv2.weight)
    assert not torch.equal(*grown)


def test_drawing_as_a_network_on_meta_raises_an_error() -> None:
    with torch.device("meta"):
        network = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    method = VarianceTransfer(new_weights="as_network")
    with pytest.raises(UserError, match="is on the meta device, without values: build the network on another"):
        Grower(network, torch.randn(2, 8), method=method, trigger={0: 0.5, 1: 1.0})


@pytest.mark.parametrize("initialisation", ["constructor", "standard", "mup"])
@pytest.mark.parametrize("multiple", [0.5, 1.0, 2.0])
def test_a_fixed_size_network_is_initialised_as_configured(initialisation: str, multiple: float) -> None:
    """Hidden layers gain / C; output layers 1 / C or, with muP, 1 / C^2 (Yuan et al. 2023, Table 1)."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 40, 3), torch.nn.BatchNorm2d(40), torch.nn.ReLU())
    network += torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(360, 60), torch.nn.Linear(60, 30))
    before, parameters = copy.deepcopy(network.state_dict()), list(network.parameters())
    graph, method = trace(network, torch.randn(2, 3, 5, 5)), FixedSize(multiple, initialisation, gain=3.0)
    widths = {name: round(multiple * group.full_width) for name, group in graph.groups.items()}
    make_seed(network, graph, method, widths, seed=4)
    if initialisation == "constructor" and multiple == 1:
        assert not differing(before, network.state_dict())
        assert all(a is b for a, b in zip(network.parameters(), parameters, strict=True))
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


def test_large_tensors_are_drawn_in_threads_with_the_same_numbers_for_any_number(monkeypatch: Any) -> None:
    def drawn(rows: int, cpus: int) -> Tensor:
        monkeypatch.setattr(os, "cpu_count", lambda: cpus)
        return normal((rows, 1024), torch.Generator().manual_seed(0))

    large = drawn(5000, cpus=1)
    assert torch.equal(large, drawn(5000, cpus=7))
    first, second = large[:900], large[4096 : 4096 + 900]
    assert abs(float(large.std()) - 1) < 1e-3 and abs(float((first * second).mean())) < 5e-3
    assert torch.equal(drawn(4, 1), torch.randn(4, 1024, generator=torch.Generator().manual_seed(0)))
