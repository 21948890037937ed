"""Weights g v / |v| in both of torch's spellings, and multipliers on rows, through growth and finishing."""

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from growlab import Grower
from growlab.grower.prune import prune
from growlab.growth import (
    GradMax,
    GrowthEvent,
    GrowthMethod,
    GrowthState,
    HyperCloning,
    Measurement,
    Net2Net,
    PairGrowth,
    Tiny,
    VarianceTransfer,
    anneal_norms,
    finish,
    grow,
    make_seed,
    restore,
)
from growlab.growth.constants import as_applied, as_stored
from growlab.growth.multipliers import fold_multipliers
from growlab.lab.networks import MLP, CausalTransformer, EncoderDecoder, WideResNet
from growlab.lab.networks.transformer import Attention
from growlab.parts import Averages, Depth
from growlab.widths import WidthGraph, resize, tensors_of, trace
from tests.cases import Around, roughen
from tests.unit.growth.measured import started

X = torch.randn(5, 3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_hooks(layer: nn.Module, dim: int | None = 0) -> nn.Module:
    with warnings.catch_warnings():
        # Deprecated, and in use.
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer, dim=dim)


SPELLINGS: dict[str, tuple[Callable[..., nn.Module], Callable[[nn.Module], object]]] = {
    "hooks": (by_hooks, nn.utils.remove_weight_norm),
    "parametrization": (
        parametrizations.weight_norm,
        lambda layer: parametrize.remove_parametrizations(layer, "weight"),
    ),
}


def vocoder(norm: Callable[..., nn.Module], dim: int | None = 0) -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv1d(3, 8, 3, padding=1), nn.ConvTranspose1d(8, 6, 4, 2, padding=1), nn.Conv1d(6, 10, 3)
    one, up, two = (norm(layer, dim=dim) for layer in layers)
    last = norm(nn.Linear(10, 4), dim=dim)
    rest = nn.LeakyReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    return nn.Sequential(one, nn.LeakyReLU(), up, nn.LeakyReLU(), two, *rest, last).double()


def train(network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        optimizer.zero_grad()
        (network(X) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_network_grows_exactly_and_ends_as_an_ordinary_one(spelling: str, dim: int | None) -> None:
    norm, remove = SPELLINGS[spelling]
    network = vocoder(norm, dim)
    full = {name: tensor.shape for name, tensor in network.state_dict().items()}
    grower = Grower(network, X, method=VarianceTransfer(), trigger={0: 1 / 4, 1: 1 / 2, 2: 1.0})
    assert grower.graph.full_widths == {"0": 8, "2": 6, "4": 10}
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    grower.follow(optimizer, state="inherit")
    for epoch in range(3):
        before = network(X).detach()
        for event in grower.step(epoch):
            assert max(event.parity_error_eval, event.parity_error_train) <= 1e-12
            torch.testing.assert_close(network(X) * grower.state.output_factor, before, rtol=1e-12, atol=1e-12)
        train(network, optimizer)
    grower.finish()
    expected, state = network(X).detach(), network.state_dict()
    assert {name: tensor.shape for name, tensor in state.items()} == full
    fresh = vocoder(norm, dim)
    fresh.load_state_dict(state, strict=True)
    assert torch.equal(fresh(X), expected) and repr(fresh) == repr(network)
    for layer in (network[0], network[2], network[4], network[-1]):
        remove(layer)
        assert isinstance(layer.weight, nn.Parameter)
    torch.testing.assert_close(network(X), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_noise_is_that_of_the_weights_themselves(spelling: str, dim: int | None) -> None:
    """Whatever the lengths of their directions: noise that cancels changes no output."""
    norm, _ = SPELLINGS[spelling]
    small, wide = (
        nn.Sequential(norm(nn.Linear(5, n), dim=dim), nn.ReLU(), norm(nn.Linear(n, 3), dim=dim)).double()
        for n in (4, 8)
    )
    with torch.no_grad():
        for name, parameter in small.named_parameters():
            if name.endswith(("weight_v", "original1")):
                parameter.mul_(20.0)
    x, method = torch.randn(6, 5).double(), HyperCloning(noise_std=0.1)
    expected, grower = small(x), Grower.from_trained(small, wide, x, method=method, verbose=False)
    (event,) = grower.step()
    torch.testing.assert_close(wide(x), expected, rtol=1e-12, atol=1e-12)
    assert event.noise_error_eval <= 1e-12
    weight = wide[2].weight.detach()
    assert 0.01 < (weight[:, :4] - weight[:, 4:]).std() / weight.std() < 1


def test_weights_are_restored_from_storage_whatever_their_lengths() -> None:
    network = vocoder(parametrizations.weight_norm)
    graph, stored = trace(network, X), dict(network.named_parameters())
    length, direction = (stored[f"0.parametrizations.weight.original{i}"] for i in (0, 1))
    with torch.no_grad():
        direction.mul_(torch.arange(1.0, 9.0).view(8, 1, 1))
        length.mul_(torch.linspace(-2, 2, 8).view(8, 1, 1))
        length[3] = 1e-120
    old = {name: tensor.detach().clone() for name, tensor in tensors_of(network, graph).items()}
    applied = as_applied(graph, old)
    torch.testing.assert_close(applied["0.parametrizations.weight.original1"], network[0].weight)
    for name, tensor in as_stored(graph, applied).items():
        torch.testing.assert_close(tensor, old[name], rtol=1e-14, atol=0)


def test_zero_rows_are_stored_with_zero_length_and_a_direction() -> None:
    network = vocoder(parametrizations.weight_norm)
    graph = trace(network, X)
    applied = dict(as_applied(graph, tensors_of(network, graph)))
    length, direction = (f"0.parametrizations.weight.original{i}" for i in (0, 1))
    applied[direction] = applied[direction].index_fill(0, torch.tensor([2, 5]), 0.0)
    # GradMax's new rows: the square of their length would vanish in float32.
    applied[direction][3] *= 1e-30
    stored = as_stored(graph, applied)
    assert float(stored[direction][3].norm()) == pytest.approx(1) and 0 < float(stored[length][3]) < 1e-29
    assert not stored[length][[2, 5]].any() and stored[length].count_nonzero() == 6
    assert (torch.linalg.vector_norm(stored[direction].flatten(1), dim=1) > 0.1).all()
    assert not torch.equal(stored[direction][2], stored[direction][5])


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_passes_over_data_measure_the_weight_itself(spelling: str) -> None:
    """This includes zero weights, such as GradMax's new rows."""
    norm, remove = SPELLINGS[spelling]
    run = started(nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), norm(nn.Linear(8, 3))), (5,), GradMax(), part=1.0)
    (weight,) = (name for name in run.graph.weight_norms if name.startswith("0."))
    tensors = dict(as_applied(run.graph, tensors_of(run.network, run.graph)))
    tensors[weight] = tensors[weight].index_fill(0, torch.tensor([1]), 0.0)
    names, keys = set(dict(run.network[0].named_parameters())), set(run.network.state_dict())
    found = Measurement(run.network, run.graph, run.batches, F.cross_entropy).gradients(tensors, [weight])
    assert set(dict(run.network[0].named_parameters())) == names and set(run.network.state_dict()) == keys
    for layer in (run.network[0], run.network[2]):
        remove(layer)
    with torch.no_grad():
        run.network[0].weight[1] = 0.0
    (expected,) = torch.autograd.grad(run.loss(), run.network[0].weight)
    assert expected[1].any()
    torch.testing.assert_close(found[weight], expected)
    assert float(found[""]) == pytest.approx(float(run.loss().detach()))


@pytest.mark.parametrize("method", [GradMax(), Tiny(fallback="pairs")])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_methods_that_look_at_data_grow_it(spelling: str, method: GradMax | Tiny) -> None:
    norm, _ = SPELLINGS[spelling]
    run = started(nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), norm(nn.Linear(8, 3))), (5,), method)
    before, width = run.network(run.batches[0][0]), run.state.widths["0"]
    event, _ = run.grow({"0": width + 2})
    after = run.network(run.batches[0][0])
    assert after.isfinite().all() and event.widths_after["0"] == width + 2
    if method.preserves:
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def test_gains_that_the_forward_adds_one_to_are_measured_with_it() -> None:
    network = Around(
        lambda net, x: net.last(torch.tanh(net.first(x)) * (1.0 + net.gain)),
        **{"first": [5, 8], "gain": nn.Parameter(torch.randn(8)), "last": [8, 3]},
    )
    run = started(network, (5,), GradMax(), part=1.0)
    assert run.graph.offsets == {"gain": 1.0}
    tensors = as_applied(run.graph, tensors_of(run.network, run.graph))
    data = Measurement(run.network, run.graph, run.batches, F.cross_entropy)
    assert data.loss(tensors) == pytest.approx(float(run.loss().detach()))


@pytest.mark.parametrize("score", ["l1", "taylor"])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_trained_networks_are_pruned_as_without_it(spelling: str, score: Any) -> None:
    norm, remove = SPELLINGS[spelling]
    normed, plain = vocoder(norm), vocoder(norm)
    for layer in (plain[0], plain[2], plain[4], plain[-1]):
        remove(layer)
    kept = []
    for network in (normed, plain):
        graph = trace(network, X)
        (network(X) - 1).square().mean().backward()
        kept.append(prune(network, graph, {"0": 5, "2": 4}, score, example=X))
    assert {name: each.tolist() for name, each in kept[0].items()} == {n: each.tolist() for n, each in kept[1].items()}
    torch.testing.assert_close(normed(X), plain(X), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_growers_are_copied_between_two_steps(spelling: str) -> None:
    network = vocoder(SPELLINGS[spelling][0])
    grower = Grower(network, X, method=PairGrowth(), trigger={0: 1 / 2, 1: 1.0}, parts=[Averages(0.9)])
    train(network, torch.optim.SGD(network.parameters(), lr=0.1))
    network(X).sum().backward()
    twin = copy.deepcopy(grower)
    assert grower.step(1) and twin.step(1)
    assert torch.equal(twin.network(X), network(X))
    assert not {*map(id, twin.network.parameters())} & {*map(id, network.parameters())}


def test_an_average_of_the_network_grows_with_it() -> None:
    network = vocoder(parametrizations.weight_norm)
    grower = Grower(network, X, method=PairGrowth(), trigger={0: 1 / 2, 1: 1.0})
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    grower.follow(optimizer)
    average = torch.optim.swa_utils.AveragedModel(network, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    grower.follow(average)
    for _ in range(2):
        train(network, optimizer)
        average.update_parameters(network)
    before = average(X).detach()
    assert grower.step(1)
    torch.testing.assert_close(average(X), before, rtol=1e-12, atol=1e-12)


def test_a_frozen_length_or_direction_keeps_the_width() -> None:
    """DINO's last layer has a frozen g of 1."""
    norm = parametrizations.weight_norm
    network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), norm(nn.Linear(8, 6, bias=False)))
    network[2].parametrizations.weight.original0.requires_grad_(False)
    graph = trace(network, torch.randn(4, 5))
    assert not graph.groups and "is frozen" in graph.fixed["2.parametrizations.weight"], graph.fixed


def residual(norm: Callable[..., nn.Module], dim: int | None) -> nn.Module:
    """A block of vocoders: its branch ends in a weight-normalised layer."""
    one, two = (norm(nn.Conv1d(8, 8, 3, padding=1), dim=dim) for _ in range(2))
    return Around(lambda net, x: x + net.two(F.leaky_relu(net.one(F.leaky_relu(x)))), one=one, two=two)


@pytest.mark.parametrize("start", ["zero", "stack"])
@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_blocks_come_in_exactly_and_learn(spelling: str, dim: int | None, start: Any) -> None:
    torch.manual_seed(0)
    norm, _ = SPELLINGS[spelling]
    ends = nn.Conv1d(3, 8, 3), (nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 4))
    network = nn.Sequential(ends[0], *(residual(norm, dim) for _ in range(3)), *ends[1]).double()
    grower = Grower(network, X, method=VarianceTransfer(), trigger={0: 0.5, 1: 1.0}, parts=[Depth(start=start)])
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    grower.follow(optimizer)
    train(network, optimizer)
    before = network(X).detach()
    (event,) = grower.step(1)
    assert [each["block"] for each in event.notes["inserted"]] == ["2", "3"]
    torch.testing.assert_close(network(X) * grower.state.output_factor, before, rtol=1e-12, atol=1e-12)
    starts = {name: p.clone() for name, p in network.named_parameters()}
    train(network, optimizer)
    assert all(bool(p.isfinite().all()) and not torch.equal(p, starts[name]) for name, p in network.named_parameters())


class ViT(nn.Module):
    """Patches, attention, a layer of torch's own encoder, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm1 = nn.Conv2d(3, 16, 2, 2), nn.LayerNorm(16)
        self.attention, self.norm2 = Attention(16, 4, 4), nn.LayerNorm(16)
        self.fc1, self.fc2, self.norm3 = nn.Linear(16, 24), nn.Linear(24, 16), nn.LayerNorm(16)
        self.inside = nn.Linear(16, 8)
        self.layer = nn.TransformerEncoderLayer(8, 4, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.attention(self.norm1(x))
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(self.layer(self.inside(self.norm3(x)))).mean(1)


class ConvNeXt(nn.Module):
    """Blocks of depthwise convolution, layer normalisation, two linear layers and a scale per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.spatial = nn.Conv2d(3, 12, 2, 2), nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(12), nn.Linear(12, 20), nn.Linear(20, 12)
        self.scale = nn.Parameter(torch.rand(12))
        self.last_norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        branch = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        x = x + (self.fc2(F.gelu(self.fc1(branch))) * self.scale).permute(0, 3, 1, 2)
        return self.head(self.last_norm(x.mean((2, 3))))


def images(seed: int) -> tuple[Tensor, ...]:
    return (torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)),)


def tokens(seed: int) -> tuple[Tensor, ...]:
    return (torch.randint(2, 11, (3, 7), generator=torch.Generator().manual_seed(seed)),)


SIZES: dict[str, int] = {"num_layers": 1, "width": 16, "num_heads": 2, "head_dim": 8, "hidden": 20}
NETWORKS: dict[str, tuple[Any, Any, int]] = {
    # How it is made, its inputs, and how many weights variance transfer rescales where pairs leave them.
    "encoder-decoder": (
        lambda: EncoderDecoder(11, 12, 1, dropout=0.0, **SIZES),
        lambda seed: (*tokens(seed), *tokens(seed + 1)),
        17,
    ),
    "decoder": (lambda: CausalTransformer(11, 9, rotary_dim=2, **SIZES), tokens, 8),
    "vision transformer": (ViT, images, 12),
    "convnext": (ConvNeXt, images, 3),
    "wide resnet": (lambda: WideResNet(1, 1, 3, 5), images, 9),
    "wide resnet without norms": (lambda: WideResNet(1, 1, 3, 5, batch_norm=False), images, 9),
    "mlp8": (lambda: MLP(192, [24] * 8, 5), images, 8),
}


@cache
def graph_of(name: str) -> WidthGraph:
    make, inputs, _ = NETWORKS[name]
    return trace(make().double(), inputs(0))


class Grown:
    """A network on its way from a quarter of its widths."""

    def __init__(self, name: str, method: GrowthMethod) -> None:
        make, self.inputs, _ = NETWORKS[name]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.network: nn.Module = make().double()
        self.make, self.method = make, method
        self.graph = graph_of(name)
        self.state: GrowthState = make_seed(self.network, self.graph, method, self.widths(0.25), seed=3)
        roughen(self.network)

    def widths(self, part: float) -> dict[str, int]:
        return {name: max(2, int(group.full_width * part)) for name, group in self.graph.groups.items()}

    def grow(self, part: float) -> GrowthEvent:
        return grow(self.network, self.graph, self.method, self.state, self.widths(part), 3, self.inputs(0))

    def output(self) -> Tensor:
        with torch.no_grad():
            return self.network.eval()(*self.inputs(7)) * self.state.output_factor


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("vision transformer", "encoder-decoder")))
        for name in NETWORKS
    ],
)
def test_ours_and_pairs_differ_in_every_layer_whose_fan_in_grows(name: str) -> None:
    ours, pairs = Grown(name, VarianceTransfer()), Grown(name, PairGrowth())
    pairs.network.load_state_dict(ours.network.state_dict())
    for part in (0.5, 1.0):
        before, widths = ours.output(), dict(ours.state.widths)
        old = {n: t.clone() for n, t in tensors_of(ours.network, ours.graph).items()}
        event = ours.grow(part)
        pairs.grow(part)
        assert max(event.parity_error_eval, 0.0) <= 1e-10
        torch.testing.assert_close(ours.output(), before, rtol=0, atol=1e-10 * float(before.abs().max()))
        rescaled = event.report["rescaled"]
        for layer in ours.graph.layers:
            fans = [ours.graph.fan_in(layer, w) for w in (widths, ours.state.widths)]
            power = 1.0 if layer.is_output else 0.5
            expected = (fans[0] / fans[1]) ** power
            assert rescaled.get(layer.weight, 1.0) == pytest.approx(expected)
            kept = [axis.kept(widths, ours.state.widths) for axis in ours.graph.axes[layer.weight]]
            new = tensors_of(ours.network, ours.graph)[layer.weight][torch.meshgrid(*kept, indexing="ij")]
            torch.testing.assert_close(new, old[layer.weight] * expected, rtol=1e-12, atol=0)
    differing = [
        n
        for n, tensor in ours.network.named_parameters()
        if tensor.dim() > 1 and not torch.equal(tensor, pairs.network.get_parameter(n))
    ]
    assert len(differing) == NETWORKS[name][2]
    # Written into the weights, it is the network as it is built.
    anneal_norms(ours.network, ours.graph, ours.state, 1.0)
    expected = ours.output()
    finish(ours.network, ours.graph, ours.method, ours.state)
    assert not ours.state.multipliers
    torch.testing.assert_close(ours.output(), expected, rtol=1e-10, atol=1e-12)
    fresh = ours.make().double().eval()
    fresh.load_state_dict(ours.network.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fresh(*ours.inputs(7)), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("batch_norm", "rescale_layers_without_batch_norm"), [(True, False), (False, True), (True, True)]
)
def test_weights_of_a_wide_resnet_end_at_the_variance_of_their_fan_in(
    batch_norm: bool, rescale_layers_without_batch_norm: bool
) -> None:
    """A stream takes the scale of those whose fan-in grows, not that of its first producer, the stem."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = WideResNet(1, 4, 3, 10, batch_norm=batch_norm)
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    graph, method = (
        trace(network, x),
        VarianceTransfer(rescale_layers_without_batch_norm=rescale_layers_without_batch_norm),
    )
    widths = [{n: int(g.full_width * part) for n, g in graph.groups.items()} for part in (0.25, 0.5, 1.0)]
    state = make_seed(network, graph, method, widths[0], 0)
    for stage in widths[1:]:
        event = grow(network, graph, method, state, stage, 0, (x,))
        assert event.parity_error_eval < 1e-4
    for layer in graph.layers:
        weight = network.get_parameter(layer.weight).detach()
        fan_in = graph.fan_in(layer, state.widths)
        target = 1 / fan_in**2 if layer.is_output else 2 / fan_in
        assert float(weight.square().mean()) == pytest.approx(target, rel=0.35), layer.weight


@pytest.mark.parametrize("layer_multipliers", [True, False])
def test_the_stream_of_a_wide_resnet_takes_the_scale_of_growing_layers(layer_multipliers: bool) -> None:
    run = Grown("wide resnet", VarianceTransfer(layer_multipliers=layer_multipliers))
    rescaled = run.grow(0.5).report["rescaled"]
    assert rescaled["blocks.0.conv2.weight"] == pytest.approx(sqrt(0.5))
    # The stem makes up for it, or goes along.
    assert rescaled.get("conv1.weight", 1.0) == pytest.approx(1.0 if layer_multipliers else sqrt(0.5))


def test_a_copy_takes_the_multiplier_of_its_source() -> None:
    run = Grown("mlp8", VarianceTransfer())
    run.grow(0.5)
    before = run.output()
    run.method = Net2Net()
    run.grow(1.0)
    torch.testing.assert_close(run.output(), before, rtol=1e-10, atol=1e-12)


def test_an_event_that_fails_leaves_the_multipliers() -> None:
    class Broken(VarianceTransfer):
        def grow(self, context: Any) -> Any:
            growth = super().grow(context)
            return growth.__class__(growth.tensors, multipliers={"hidden.2.weight": 3.0})

    run = Grown("mlp8", VarianceTransfer())
    run.grow(0.5)
    before, known = run.output(), copy.deepcopy(run.state.multipliers)
    run.method = Broken()
    with pytest.raises(RuntimeError, match="changed the output"):
        run.grow(1.0)
    assert run.state.multipliers == known
    assert torch.equal(run.output(), before)


@pytest.mark.parametrize("name", ["mlp8", "vision transformer", "decoder"])
def test_a_state_brings_a_fresh_network_to_the_same_outputs(name: str) -> None:
    """As a resumed run does: shapes, then tensors, then what the state says beyond them."""
    run = Grown(name, VarianceTransfer())
    run.grow(0.5)
    state = GrowthState.from_dict(run.state.as_dict())
    assert state == run.state
    fresh = run.make().double()
    resize(fresh, run.graph, run.graph.full_widths, state.widths)
    restore(fresh, run.graph, replace(state, multipliers={n: [1.0] * len(m) for n, m in state.multipliers.items()}))
    # They come with the tensors, too.
    fresh.load_state_dict(run.network.state_dict())
    copied = copy.deepcopy(run.network)
    with torch.no_grad():
        for network in (fresh, copied):
            assert torch.equal(network.eval()(*run.inputs(7)), run.output())
    assert len([h for m in copied.modules() for h in m._forward_pre_hooks]) == len(
        [h for m in run.network.modules() for h in m._forward_pre_hooks]
    )


def test_multipliers_of_another_width_are_refused() -> None:
    run, other = Grown("mlp8", VarianceTransfer()), Grown("mlp8", VarianceTransfer())
    for one, width in ((run, 0.5), (other, 1.0)):
        one.grow(width)
    rows = {name: len(rows) for name, rows in run.state.multipliers.items()}
    wider = other.network.state_dict()
    saved = {
        name: wider[name] if name.endswith("growth_multipliers") else tensor
        for name, tensor in run.network.state_dict().items()
    }
    with pytest.raises(RuntimeError, match=f"channels, the network has {next(iter(rows.values()))}"):
        run.network.load_state_dict(saved)


def stepped(run: Grown, make_optimizer: Any) -> dict[str, Tensor]:
    """Products of weights and multipliers after a few steps."""
    network = copy.deepcopy(run.network).train()
    optimizer = make_optimizer(network.parameters())
    for seed in (11, 12, 13):
        optimizer.zero_grad()
        F.cross_entropy(network(*run.inputs(seed)), torch.arange(4)).backward()
        optimizer.step()
    fold_multipliers(network)
    return {name: tensor.detach() for name, tensor in network.named_parameters()}


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_steps_of_sgd_move_products_as_if_there_were_no_multipliers(momentum: float) -> None:
    run = Grown("mlp8", VarianceTransfer())
    run.grow(0.5)
    run.grow(1.0)
    folded = copy.copy(run)
    folded.network = copy.deepcopy(run.network)
    fold_multipliers(folded.network)
    made = lambda p: torch.optim.SGD(p, 0.1, momentum=momentum, weight_decay=1e-2)  # noqa: E731
    one, other = stepped(run, made), stepped(folded, made)
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-9, atol=1e-12)


def test_the_literal_rule_changes_the_function_and_its_receipt_says_by_how_much() -> None:
    run = Grown("mlp8", VarianceTransfer(as_published=True))
    event = run.grow(0.5)
    assert event.parity_tolerance_eval is None
    assert event.parity_error_eval > 0.1
    assert not run.state.multipliers
    assert run.state.output_factor == 1.0
    assert event.report["rescaled"]["hidden.2.weight"] == pytest.approx(sqrt(0.5))


def test_modules_are_found_that_apply_weights_of_others() -> None:
    run = Grown("vision transformer", VarianceTransfer())
    callers = {layer.weight: layer.callers for layer in run.graph.layers}
    assert callers["attention.query.weight"] == ("attention.query",)
    assert callers["head.weight"] == ("head",)
    # torch's own attention uses the weight of the layer inside of it.
    assert callers["layer.self_attn.out_proj.weight"] == ("layer.self_attn",)


@pytest.mark.parametrize(
    ("beside", "backend"),
    [*(("norm", "eager"), ("nothing compiled", "eager")), pytest.param("nothing", "aot_eager", marks=pytest.mark.slow)],
)
def test_a_compiled_module_inside_grows_and_is_finished(beside: str, backend: str) -> None:
    def compiled(module: nn.Module) -> nn.Module:
        return torch.compile(module, backend=backend)  # type: ignore[return-value]

    torch.manual_seed(0)
    torch._dynamo.reset()
    # The compiler gives an empty graph up, and from then on runs what a layer is compiled to under our mode.
    norm = {"nothing": nn.Identity(), "norm": nn.LayerNorm(16), "nothing compiled": nn.Identity()}[beside]
    norm = norm if beside == "nothing" else compiled(norm)
    network = nn.Sequential(nn.Linear(6, 16), compiled(nn.Linear(16, 16)), nn.ReLU(), norm, nn.Linear(16, 3)).double()
    x = torch.randn(32, 6).double()
    schedule = {0: 0.25, 1: 0.5, 2: 1.0}
    grower = Grower(network, x, method=VarianceTransfer(), trigger=schedule, anneal_steps=1)
    before = network(x)
    for epoch in (1, 2):
        (event,) = grower.step(epoch=epoch)
        assert event.parity_error_train < 1e-9
    assert any(name.endswith("unfinished_growth_multipliers") for name in network.state_dict())
    for _ in range(2):
        torch.testing.assert_close(network(x), before, rtol=1e-9, atol=1e-9)
    grower.anneal(1.0)
    before = network(x)
    grower.finish()
    assert not any("unfinished" in name for name in network.state_dict())
    torch.testing.assert_close(network(x), before, rtol=1e-9, atol=1e-9)


def test_layers_with_other_hooks_are_multiplied_just_as_plain_ones() -> None:
    """Hooks find the weight itself; after an error it is there again."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)).double()
    x = torch.randn(4, 6).double()
    grower = Grower(network, x, method=VarianceTransfer(), trigger={0: 0.5, 1.0: 1.0}, anneal_steps=0)
    grower.step(epoch=1)
    layer, weights = network[2], list(network.parameters())
    seen: list[Tensor] = []

    def step() -> list[Any]:
        network.zero_grad()
        out = network(x)
        out.square().sum().backward()
        return [out, *[weight.grad for weight in weights]]

    alone = step()
    hook = layer.register_forward_hook(lambda module, *_: seen.append(module.weight))
    for a, b in zip(alone, step(), strict=True):
        assert torch.equal(a, b)
    hook.remove()
    assert seen[0] is weights[2] and len(seen) == 1
    assert not torch.allclose(alone[0], layer.bias + network[:2](x) @ layer.weight.T)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(x)
    assert layer.weight is weights[2]
