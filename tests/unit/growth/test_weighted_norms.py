"""Normalisations over channels that grow: exact at an event, plain at the end."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.growth import (
    GrowthMethod,
    GrowthState,
    HyperCloning,
    Measurement,
    Net2Net,
    PairGrowth,
    ParityError,
    VarianceTransfer,
    anneal_norms,
    finish,
    grow,
    make_seed,
)
from growlab.growth.weighted_norms import annealed, weigh
from growlab.widths import Axis, ChannelNorm, Group, Part, WidthGraph, resized, tensors_of, trace
from tests.cases import NETWORKS, Around, graph_of, outputs, roughen, widths_at

CHANNELS = 6


def graph_around(norm: nn.Module, groups: int = 1) -> WidthGraph:
    """The width graph of a normalisation alone."""
    axis = Axis((Part("x", outer=groups),), "out")
    names = {name: f"0.{name}" for name, _ in norm.named_parameters()}
    record = ChannelNorm("0", axis, names.get("weight"), names.get("bias"))
    width = CHANNELS // groups
    return WidthGraph(
        {"x": Group("x", width)},
        {name: (axis,) for name in names.values()},
        (),
        (),
        frozenset(),
        0,
        channel_norms=(record,),
    )


NORMS = {
    "layer": lambda size: nn.LayerNorm(size),
    "rms": lambda size: nn.RMSNorm(size),
    "rms eps": lambda size: nn.RMSNorm(size, eps=0.1, elementwise_affine=False),
    "group": lambda size: nn.GroupNorm(1, size),
}


def example(norm: str, channels: int = CHANNELS) -> Tensor:
    shape = (3, channels, 4) if norm == "group" else (3, 4, channels)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def channel_dim(norm: str) -> int:
    return 1 if norm == "group" else 2


@pytest.mark.parametrize("name", NORMS)
def test_channels_of_no_weight_leave_the_statistics_alone(name: str) -> None:
    few, many = (nn.Sequential(NORMS[name](size)).double() for size in (4, CHANNELS))
    for module in (few, many):
        roughen(module)
    with torch.no_grad():
        for small, large in zip(few.parameters(), many.parameters(), strict=True):
            large[:4] = small
    assert weigh(many, graph_around(many[0]), {"x": CHANNELS}, {"x": [1.0] * 4 + [0.0] * 2}) == ["0"]
    x, dim = example(name), channel_dim(name)
    torch.testing.assert_close(many(x).narrow(dim, 0, 4), few(x.narrow(dim, 0, 4)), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", NORMS)
def test_copies_that_share_a_weight_count_as_one_channel(name: str) -> None:
    sources = torch.tensor([0, 1, 2, 0, 0, 1])
    few, many = nn.Sequential(NORMS[name](3)).double(), nn.Sequential(NORMS[name](CHANNELS)).double()
    weights = [1 / 3, 1 / 2, 1.0, 1 / 3, 1 / 3, 1 / 2]
    weigh(many, graph_around(many[0]), {"x": CHANNELS}, {"x": weights})
    x, dim = example(name, 3), channel_dim(name)
    torch.testing.assert_close(many(x.index_select(dim, sources)), few(x).index_select(dim, sources))


def test_each_group_of_channels_has_its_own_statistics() -> None:
    many, few = nn.Sequential(nn.GroupNorm(2, 6)).double(), nn.GroupNorm(2, 4).double()
    weigh(many, graph_around(many[0], groups=2), {"x": 3}, {"x": [1.0, 1.0, 0.0]})
    x, kept = example("group"), torch.tensor([0, 1, 3, 4])
    torch.testing.assert_close(many(x)[:, kept], few(x[:, kept]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NORMS)
def test_nearly_equal_weights_are_nearly_plain_in_any_precision(name: str, dtype: torch.dtype) -> None:
    module = nn.Sequential(NORMS[name](CHANNELS)).to(dtype)
    x = example(name).to(dtype)
    plain = module(x)
    weigh(module, graph_around(module[0]), {"x": CHANNELS}, {"x": [1.0 - 1e-9] + [1.0] * (CHANNELS - 1)})
    assert module(x).dtype == plain.dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(module(x), plain, rtol=tolerance, atol=tolerance)


def test_gradients_reach_new_channels_as_well_as_old_ones() -> None:
    module = nn.Sequential(nn.LayerNorm(CHANNELS)).double()
    weigh(module, graph_around(module[0]), {"x": CHANNELS}, {"x": [1.0] * 4 + [0.0] * 2})
    x = example("layer").requires_grad_()
    assert torch.autograd.gradcheck(module, x)


class Grown:
    """The networks' row of every kind of normalisation, after an event that weighs them."""

    def __init__(self, method=None, parts: tuple[float, float] = (0.3, 0.8)) -> None:
        self.case, self.graph = NETWORKS["channel norms"], graph_of("channel norms")
        self.network, self.x = self.case.make(), self.case.inputs()
        self.method = method or PairGrowth()
        widths = widths_at(self.graph, parts[0])
        self.state: GrowthState = make_seed(self.network, self.graph, self.method, widths, seed=0)
        roughen(self.network)
        self.event = self.grow(widths_at(self.graph, parts[1]))

    def grow(self, widths: dict[str, int]):
        return grow(self.network, self.graph, self.method, self.state, widths, seed=0, probe=(self.x,))

    def outputs(self) -> Tensor:
        return outputs(self.network, self.x, training=False)


def test_a_network_goes_from_weighted_to_plain_without_a_jump() -> None:
    run = Grown()
    assert run.event.weighted_norms == run.event.as_dict()["weighted_norms"]
    assert run.event.weighted_norms == ["grouped", "flat", "layer", "rms"]
    plain = copy.deepcopy(run.network)
    weigh(plain, run.graph, run.state.widths, {})
    end = outputs(plain, run.x, training=False)
    gaps = []
    for progress in (0.0, 0.5, 0.9, 0.99, 1.0):
        anneal_norms(run.network, run.graph, run.state, progress)
        gaps.append(float((run.outputs() - end).abs().max()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1e-2
    assert gaps[-1] == 0
    assert run.state.norm_weights == {} and run.state.norm_progress == 0.0
    # Nothing of it is left: an ordinary network.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.network.modules())
    assert vars(run.network.rms).keys() == vars(nn.RMSNorm(2)).keys()


@pytest.mark.parametrize("method", [PairGrowth(), VarianceTransfer(), Net2Net()], ids=lambda m: m.name)
def test_new_channels_of_a_deep_gated_network_stay_as_large_as_old_ones(method: GrowthMethod) -> None:
    """Blocks are half of a Transformer as it is today: RMSNorm and a gated MLP beside a residual stream."""

    def gated(net: Around, x: Tensor) -> Tensor:
        normed = net.norm(x)
        return x + net.down(F.silu(net.gate(normed)) * net.up(normed))

    torch.manual_seed(0)
    blocks = [Around(gated, norm=nn.RMSNorm(32), gate=[32, 64], up=[32, 64], down=[64, 32]) for _ in range(12)]
    network = nn.Sequential(nn.Linear(8, 32), *blocks, nn.RMSNorm(32), nn.Linear(32, 4)).double()
    x = torch.randn(16, 8, dtype=torch.float64)
    graph = trace(network, x)
    state = make_seed(network, graph, method, widths_at(graph, 0.25), seed=0)
    before = network[:13](x).abs().max()
    event = grow(network, graph, method, state, widths_at(graph, 0.5), seed=0, probe=(x,))
    assert event.parity_error_eval < 1e-12
    assert network[:13](x).abs().max() < 10 * before


def test_passes_with_channels_of_zero_see_the_same_loss_and_leave_the_network_as_it_was() -> None:
    run = Grown()
    data = Measurement(
        *(run.network, run.graph, [(run.x, torch.zeros(1))]),
        lambda output, _: output.square().mean(),
        norm_weights=run.state.norm_weights,
    )
    before, old = run.outputs(), tensors_of(run.network, run.graph)
    widths = run.state.widths
    wider = {name: resized(tensor, run.graph.axes[name], widths, run.graph.full_widths) for name, tensor in old.items()}
    plain = data.loss(old)
    assert data.loss(wider) == pytest.approx(plain, rel=1e-12)
    assert torch.equal(run.outputs(), before)


def test_an_event_while_norms_anneal_continues_from_their_weights() -> None:
    run = Grown()
    anneal_norms(run.network, run.graph, run.state, 0.4)
    before = run.outputs()
    event = run.grow(run.graph.full_widths)
    assert event.parity_error_eval < 1e-13
    torch.testing.assert_close(run.outputs(), before)
    assert set(run.state.norm_weights["conv"]) == {1.0, 0.4, 0.0}


def trained_to_the_end(progress: float | None) -> tuple[Any, nn.Module, WidthGraph, GrowthMethod, GrowthState]:
    """A Transformer layer after a loop like the README's, its normalisations annealed that far in each stage."""
    case, graph, method = NETWORKS["transformer"], graph_of("transformer"), VarianceTransfer()
    network, x = case.make(), case.inputs()
    state = make_seed(network, graph, method, widths_at(graph, 0.4), seed=0)
    roughen(network)
    for part in (0.7, 1.0):
        event = grow(network, graph, method, state, widths_at(graph, part), seed=0, probe=(x,))
        assert event.weighted_norms == ["norm1", "norm2"]
        optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
        for step in range(4):
            if progress is not None:
                anneal_norms(network, graph, state, progress * (step + 1) / 4)
            optimizer.zero_grad()
            (network(x) * state.output_factor).square().mean().backward()
            optimizer.step()
    return case, network, graph, method, state


def test_a_finished_network_loads_into_a_plain_one_and_computes_the_same() -> None:
    case, network, graph, method, state = trained_to_the_end(1.0)
    x = case.inputs(seed=7)
    in_training = outputs(network, x, training=True) * state.output_factor
    assert state.multipliers
    finish(network, graph, method, state)
    for _ in range(2):
        plain = case.make()
        plain.load_state_dict(network.state_dict(), strict=True)
        torch.testing.assert_close(outputs(plain, x, training=True), in_training, rtol=1e-10, atol=1e-10)
        assert state.output_factor == 1.0 and not state.multipliers
        finish(network, graph, method, state)  # Nothing is left to finish.


@pytest.mark.parametrize("progress", [None, 0.9])
def test_norms_that_are_not_annealed_cannot_be_finished_or_loaded(progress: float | None) -> None:
    case, network, graph, method, state = trained_to_the_end(progress)
    before, average = outputs(network, case.inputs(), False), copy.deepcopy(network)
    with pytest.raises(UserError, match=r"norm1 and 1 more still weight channels.*call anneal_norms") as raised:
        finish(network, graph, method, state)
    assert "\n" not in str(raised.value)
    torch.testing.assert_close(outputs(network, case.inputs(), False), before, rtol=0, atol=0)
    plain = case.make()
    with pytest.raises(RuntimeError, match=r"Unexpected key.*norm1\.unfinished_growth_channel_weights"):
        plain.load_state_dict(network.state_dict())
    # Its average may lag behind.
    anneal_norms(network, graph, state, 1.0)
    with pytest.raises(UserError, match="norm1 and 1 more"):
        finish(network, graph, method, state, [average])
    assert state.multipliers


def test_a_state_dict_contains_the_weights_of_channels() -> None:
    run, other = Grown(), Grown()
    anneal_norms(run.network, run.graph, run.state, 0.4)
    with torch.no_grad():
        for parameter in run.network.parameters():
            parameter.mul_(1.1)
    other.network.load_state_dict(run.network.state_dict())
    torch.testing.assert_close(other.outputs(), run.outputs(), rtol=0, atol=0)
    plain = copy.deepcopy(run.network)
    weigh(plain, run.graph, run.state.widths, {})
    with pytest.raises(RuntimeError, match="Missing key"):
        run.network.load_state_dict(plain.state_dict())


def test_weights_of_channels_of_another_width_are_refused() -> None:
    run, other = Grown(), Grown(parts=(0.3, 1.0))
    wider = other.network.state_dict()
    saved = {
        name: wider[name] if name.endswith("channel_weights") else tensor
        for name, tensor in run.network.state_dict().items()
    }
    with pytest.raises(RuntimeError, match="channels, the network has"):
        run.network.load_state_dict(saved)


def test_weights_survive_a_checkpoint_and_a_copy() -> None:
    run = Grown()
    anneal_norms(run.network, run.graph, run.state, 0.4)
    expected = run.outputs()
    copied = copy.deepcopy(run.network)
    state = GrowthState.from_dict(run.state.as_dict())
    anneal_norms(run.network, run.graph, run.state, 1.0)
    torch.testing.assert_close(outputs(copied, run.x, training=False), expected, rtol=0, atol=0)
    anneal_norms(run.network, run.graph, state, state.norm_progress)
    torch.testing.assert_close(run.outputs(), expected, rtol=0, atol=0)


def test_an_event_that_is_undone_leaves_the_weights_as_they_were() -> None:
    run = Grown()
    anneal_norms(run.network, run.graph, run.state, 0.4)
    before, state = run.outputs(), run.state.as_dict()

    class Wrong(PairGrowth):
        def expand(self, context, name, old):
            return 2 * super().expand(context, name, old)

    run.method = Wrong()
    with pytest.raises(ParityError):
        run.grow(run.graph.full_widths)
    assert run.state.as_dict() == state
    torch.testing.assert_close(run.outputs(), before, rtol=0, atol=0)


def test_whole_factors_leave_net2net_plain_normalisations() -> None:
    run = Grown(Net2Net(), (0.3, 0.3))
    doubled = {name: 2 * width for name, width in run.state.widths.items()}
    event = run.grow(doubled)
    assert event.weighted_norms == [] and event.parity_error_train < 1e-13
    # Concatenated streams that grow by different factors are weighted all the same.
    other = Grown(Net2Net(), (0.3, 0.3))
    event = other.grow({**other.state.widths, "hidden": 2 * other.state.widths["hidden"]})
    assert event.weighted_norms == ["rms"] and event.parity_error_train < 1e-13


def test_an_error_inside_leaves_no_weights_behind() -> None:
    run = Grown()
    with pytest.raises(RuntimeError):
        run.network.rms(torch.randn(2, 3, dtype=torch.float64))
    norm = nn.LayerNorm(4).double()
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(norm(x).mean(1), torch.zeros(2, dtype=torch.float64))
    assert run.outputs().isfinite().all()


def test_progress_takes_the_straight_way() -> None:
    assert annealed({"x": [0.5, 0.0, 1.0]}, 0.5) == {"x": [0.75, 0.5, 1.0]}
    assert annealed({"x": [0.5]}, 1.0) == {}


def test_a_mean_by_numpys_names_is_weighed() -> None:
    norm = Around(
        lambda net, x: x * torch.rsqrt(x.pow(2).mean(axis=-1, keepdims=True) + 1e-6) * net.gain,
        gain=nn.Parameter(torch.rand(16) + 0.5),
    )
    network = nn.Sequential(nn.Linear(5, 16), norm, nn.Linear(16, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    graph = trace(network, x)
    assert graph.full_widths == {"0": 16}
    state = make_seed(network, graph, PairGrowth(), {"0": 8}, seed=0)
    before = network(x)
    event = grow(network, graph, PairGrowth(), state, {"0": 16}, seed=0, probe=(x,))
    assert event.parity_error_eval < 1e-12
    torch.testing.assert_close(network(x), before)


def by_standard_deviation(norm: nn.Module, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def by_variance(norm: nn.Module, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()


def by_both_at_once(norm: nn.Module, x: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, dim=[-1], correction=0, keepdim=True)
    return (x - mean) * (variance + 1e-6).rsqrt()


def by_functions_positions(norm: nn.Module, x: Tensor) -> Tensor:
    deviation, mean = torch.std_mean(x, -1, False)
    return (x - mean[..., None] + 0.1 * torch.std(x, -1, True, True)) / deviation[..., None]


def of_samples_too(norm: nn.Module, x: Tensor) -> Tensor:
    """Deviations of each channel over the samples and of all entries, which stay as they are."""
    x = x / (x.std(-1, keepdim=True) + 1e-6)
    return x / (1 + x.std(0) + x.var(0, unbiased=False))


def written(normalise: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    gain, shift = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))
    return Around(lambda net, x: normalise(net, x) * net.gain + net.shift, gain=gain, shift=shift)


@pytest.mark.parametrize("method", [PairGrowth(), VarianceTransfer(), HyperCloning()], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "normalise", [by_standard_deviation, by_variance, by_both_at_once, by_functions_positions, of_samples_too]
)
def test_variances_and_deviations_over_channels_are_weighed(
    normalise: Callable[[nn.Module, Tensor], Tensor], method: GrowthMethod
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 16), written(normalise), nn.Linear(16, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    graph = trace(network, x)
    assert graph.full_widths == {"0": 16}
    state = make_seed(network, graph, method, {"0": 8}, seed=0)
    before = network(x) * state.output_factor
    event = grow(network, graph, method, state, {"0": 16}, seed=0, probe=(x,))
    assert event.parity_error_eval < 1e-12
    torch.testing.assert_close(network(x) * state.output_factor, before, rtol=1e-10, atol=1e-10)
    anneal_norms(network, graph, state, 1.0)
    annealed_outputs = network(x) * state.output_factor
    finish(network, graph, method, state)
    plain = nn.Sequential(nn.Linear(5, 16), written(normalise), nn.Linear(16, 3)).double()
    plain.load_state_dict(network.state_dict())
    torch.testing.assert_close(plain(x), annealed_outputs)


@pytest.mark.parametrize("by_shape", [False, True])
def test_a_scale_behind_a_euclidean_norm_follows_the_channels_or_stays(by_shape: bool) -> None:
    """RMS normalisation by the Euclidean norm, whose scale is a number or follows the number of channels."""
    norm = Around(lambda net, x: F.normalize(x, dim=-1) * (x.shape[-1] if by_shape else 8) ** 0.5)
    network = nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    graph, method = trace(network, x), PairGrowth()
    (norm,) = graph.channel_norms
    assert norm.summed and norm.counted is by_shape
    state = make_seed(network, graph, method, {"0": 2}, seed=0)
    event = grow(network, graph, method, state, {"0": 8}, seed=0, probe=(x,))
    assert event.weighted_norms == ["1"] and event.parity_error_eval < 1e-14
    # Half of the way: new channels count half; where the scale follows, as many count as there are.
    anneal_norms(network, graph, state, 0.5)
    weights = torch.tensor([1.0] * 2 + [0.5] * 6, dtype=torch.float64)
    y = torch.randn(4, 8, dtype=torch.float64)
    total = (y.square() * weights).sum(-1, keepdim=True) * (8 / 5 if by_shape else 1.0)
    torch.testing.assert_close(network[1](y), y * (8 / total).sqrt())
