"""Normalisations over channels that grow: exact at an event, plain at the end."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.base.errors import UserError
from growlab.growth import (
    GrowthEvent,
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
    restore,
)
from growlab.growth.weighted_norms import annealed, weigh
from growlab.widths import Axis, ChannelNorm, Group, Part, WidthGraph, resize, resized, tensors_of
from tests.cases import NETWORKS, Around, Growing, outputs, planted, roughen

CHANNELS = 6


def weighted(norm: nn.Module, weights: list[float], groups: int = 1) -> nn.Sequential:
    """A single normalisation with weighted channels."""
    axis = Axis((Part("x", outer=groups),), "out")
    names = {name: f"0.{name}" for name, _ in norm.named_parameters()}
    record = ChannelNorm("0", axis, names.get("weight"), names.get("bias"))
    group, axes = Group("x", len(weights)), {name: (axis,) for name in names.values()}
    graph = WidthGraph({"x": group}, axes, (), (), frozenset(), 0, channel_norms=(record,))
    network = nn.Sequential(norm)
    assert weigh(network, graph, {"x": len(weights)}, {"x": weights}) == ["0"]
    return network


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
    few, many = (NORMS[name](size).double() for size in (4, CHANNELS))
    for module in (few, many):
        roughen(module)
    with torch.no_grad():
        for small, large in zip(few.parameters(), many.parameters(), strict=True):
            large[:4] = small
    network, x, dim = weighted(many, [1.0] * 4 + [0.0] * 2), example(name), channel_dim(name)
    torch.testing.assert_close(network(x).narrow(dim, 0, 4), few(x.narrow(dim, 0, 4)), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", NORMS)
def test_copies_that_share_a_weight_count_as_one_channel(name: str) -> None:
    sources = torch.tensor([0, 1, 2, 0, 0, 1])
    few = NORMS[name](3).double()
    many = weighted(NORMS[name](CHANNELS).double(), [1 / 3, 1 / 2, 1.0, 1 / 3, 1 / 3, 1 / 2])
    x, dim = example(name, 3), channel_dim(name)
    torch.testing.assert_close(many(x.index_select(dim, sources)), few(x).index_select(dim, sources))


def test_each_group_of_channels_has_its_own_statistics() -> None:
    many, few = weighted(nn.GroupNorm(2, 6).double(), [1.0, 1.0, 0.0], groups=2), nn.GroupNorm(2, 4).double()
    x, kept = example("group"), torch.tensor([0, 1, 3, 4])
    torch.testing.assert_close(many(x)[:, kept], few(x[:, kept]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
@pytest.mark.parametrize("name", NORMS)
def test_nearly_equal_weights_are_nearly_plain_in_any_precision(name: str, scale: float, dtype: torch.dtype) -> None:
    norm, x = NORMS[name](CHANNELS).to(dtype), (scale * example(name)).to(dtype)
    plain = norm(x)
    found = weighted(norm, [1.0 - 1e-9] + [1.0] * (CHANNELS - 1))(x)
    assert found.dtype == plain.dtype
    tolerance = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, plain, rtol=tolerance, atol=tolerance)


def test_arguments_of_torchs_own_functions_are_accepted_by_name() -> None:
    class Named(nn.LayerNorm):
        def forward(self, input: Tensor) -> Tensor:
            return torch.layer_norm(input, self.normalized_shape, self.weight, self.bias, cudnn_enable=False)

    network = weighted(Named(CHANNELS).double(), [1.0] * 4 + [0.0] * 2)
    expected = weighted(nn.LayerNorm(CHANNELS).double(), [1.0] * 4 + [0.0] * 2)
    assert torch.equal(network(example("layer")), expected(example("layer")))


def test_gradients_reach_new_channels_as_well_as_old_ones() -> None:
    network = weighted(nn.LayerNorm(CHANNELS).double(), [1.0] * 4 + [0.0] * 2)
    assert torch.autograd.gradcheck(network, example("layer").requires_grad_())


def normed(method: GrowthMethod, part: float = 0.3) -> Growing:
    """A growing network with every kind of normalisation."""
    return planted("channel norms", method, part)


def grown(part: float = 0.8) -> tuple[Growing, GrowthEvent]:
    """The same network after an event that weights its channels."""
    run = normed(PairGrowth())
    return run, run.grow(part)


def test_a_network_goes_from_weighted_to_plain_without_a_jump() -> None:
    run, event = grown()
    assert event.weighted_norms == event.as_dict()["weighted_norms"] == ["grouped", "flat", "layer", "rms"]
    plain = copy.deepcopy(run.network)
    weigh(plain, run.graph, run.state.widths, {})
    end = outputs(plain, *run.x, training=False)
    gaps = []
    for progress in (0.0, 0.5, 0.9, 0.99, 1.0):
        anneal_norms(run.network, run.graph, run.state, progress)
        gaps.append(float((run.outputs() - end).abs().max()))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 1e-2
    assert gaps[-1] == 0
    assert run.state.norm_weights == {} and run.state.norm_progress == 0.0
    # No hook and no attribute is left.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in run.network.modules())
    assert vars(run.network.rms).keys() == vars(nn.RMSNorm(2)).keys()


@pytest.mark.parametrize("method", [PairGrowth(), VarianceTransfer(), Net2Net()], ids=lambda m: m.name)
def test_new_channels_of_a_deep_gated_network_stay_as_large_as_old_ones(method: GrowthMethod) -> None:
    """Blocks are those of a current Transformer without attention: RMSNorm and a gated MLP on a residual stream."""

    def gated(net: Around, x: Tensor) -> Tensor:
        normed = net.norm(x)
        return x + net.down(F.silu(net.gate(normed)) * net.up(normed))

    torch.manual_seed(0)
    blocks = [Around(gated, norm=nn.RMSNorm(32), gate=[32, 64], up=[32, 64], down=[64, 32]) for _ in range(12)]
    network = nn.Sequential(nn.Linear(8, 32), *blocks, nn.RMSNorm(32), nn.Linear(32, 4)).double()
    x = torch.randn(16, 8, dtype=torch.float64)
    run = Growing(network, x, method, 0.25, rough=False)
    before = network[:13](x).abs().max()
    assert run.grow(0.5).parity_error_eval < 1e-12
    assert network[:13](x).abs().max() < 10 * before


def test_passes_with_channels_of_zero_see_the_same_loss_and_leave_the_network_as_it_was() -> None:
    run, _ = grown()
    data = Measurement(
        *(run.network, run.graph, [(*run.x, torch.zeros(1))]),
        lambda output, _: output.square().mean(),
        norm_weights=run.state.norm_weights,
    )
    before, old = run.outputs(), tensors_of(run.network, run.graph)
    widths = run.state.widths
    wider = {name: resized(tensor, run.graph.axes[name], widths, run.graph.full_widths) for name, tensor in old.items()}
    assert data.loss(wider) == pytest.approx(data.loss(old), rel=1e-12)
    assert torch.equal(run.outputs(), before)


def test_an_event_while_norms_anneal_continues_from_their_weights() -> None:
    run, _ = grown()
    anneal_norms(run.network, run.graph, run.state, 0.4)
    before = run.outputs()
    assert run.grow().parity_error_eval < 1e-13
    torch.testing.assert_close(run.outputs(), before)
    assert set(run.state.norm_weights["conv"]) == {1.0, 0.4, 0.0}


@pytest.mark.parametrize("progress", [None, 0.9])
def test_norms_that_are_not_annealed_cannot_be_finished_or_loaded(progress: float | None) -> None:
    run = planted("transformer", VarianceTransfer(), 0.4)
    assert run.grow().weighted_norms == ["norm1", "norm2"]
    network, known = run.network, (run.graph, run.method, run.state)
    if progress:
        anneal_norms(network, run.graph, run.state, progress)
    before, average = run.outputs(), copy.deepcopy(network)
    with pytest.raises(UserError, match=r"norm1 and 1 more still weight channels.*call anneal_norms") as raised:
        finish(network, *known)
    assert "\n" not in str(raised.value)
    torch.testing.assert_close(run.outputs(), before, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*norm1\.unfinished_growth_channel_weights"):
        NETWORKS["transformer"].make().load_state_dict(network.state_dict())
    # An average may not be annealed yet.
    anneal_norms(network, run.graph, run.state, 1.0)
    with pytest.raises(UserError, match="norm1 and 1 more"):
        finish(network, *known, [average])
    assert run.state.multipliers


def growing(name: str, method: GrowthMethod, part: float = 0.7) -> Growing:
    """A network after an event, with multipliers or partly annealed norms."""
    run = planted(name, method, 0.4)
    run.grow(part)
    anneal_norms(run.network, run.graph, run.state, 0.4)
    roughen(run.network, seed=7)
    return run


@pytest.mark.parametrize(
    ("name", "method"),
    [("channel norms", PairGrowth()), *((name, VarianceTransfer()) for name in ("mlp", "transformer", "attention"))],
)
def test_copies_states_and_tensors_bring_weights_and_multipliers(name: str, method: GrowthMethod) -> None:
    """Restored as in a resumed run: shapes, then the growth state, then tensors."""
    run = growing(name, method)
    expected, copied, tensors = run.outputs(), copy.deepcopy(run.network), run.network.state_dict()
    state = GrowthState.from_dict(run.state.as_dict())
    assert state == run.state and (state.multipliers or state.norm_weights)
    fresh = NETWORKS[name].make()
    resize(fresh, run.graph, run.graph.full_widths, state.widths)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        fresh.load_state_dict(tensors)
    ones = {n: [1.0] * len(rows) for n, rows in state.multipliers.items()}
    restore(fresh, run.graph, replace(state, multipliers=ones, norm_progress=0.1))
    # Tensors bring weights and multipliers too, and replace the wrong ones.
    fresh.load_state_dict(tensors)
    anneal_norms(run.network, run.graph, run.state, 1.0)
    for network in (fresh, copied):
        assert torch.equal(outputs(network, *run.x, False), expected)
    hooks = [len(m._forward_pre_hooks) for m in run.network.modules()]
    assert state.norm_weights or [len(m._forward_pre_hooks) for m in copied.modules()] == hooks
    anneal_norms(run.network, run.graph, state, state.norm_progress)
    assert torch.equal(run.outputs(), expected)
    if state.norm_weights:
        plain = copy.deepcopy(run.network)
        weigh(plain, run.graph, state.widths, {})
        with pytest.raises(RuntimeError, match="Missing key"):
            run.network.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("entries", ["channel_weights", "growth_multipliers"])
def test_weights_and_multipliers_of_another_width_raise_errors(entries: str) -> None:
    run, wider = (growing("transformer", VarianceTransfer(), part) for part in (0.7, 1.0))
    other = wider.network.state_dict()
    saved = {n: other[n] if n.endswith(entries) else tensor for n, tensor in run.network.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"channels, the network has \d"):
        run.network.load_state_dict(saved)


def test_an_event_that_is_undone_leaves_weights_and_multipliers_as_they_were() -> None:
    run = growing("transformer", VarianceTransfer())
    before, state = run.outputs(), copy.deepcopy(run.state.as_dict())
    assert state["multipliers"] and state["norm_weights"]

    class Wrong(VarianceTransfer):
        def expand(self, context, name, old):
            return 2 * super().expand(context, name, old)

    run.method = Wrong()
    with pytest.raises(ParityError):
        run.grow()
    assert run.state.as_dict() == state
    torch.testing.assert_close(run.outputs(), before, rtol=0, atol=0)


def test_whole_factors_leave_net2net_plain_normalisations() -> None:
    run, other = normed(Net2Net()), normed(Net2Net())
    event = run.grow({name: 2 * width for name, width in run.state.widths.items()})
    assert event.weighted_norms == [] and event.parity_error_train < 1e-13
    # Concatenated streams that grow by different factors are still weighted.
    event = other.grow({"hidden": 2 * other.state.widths["hidden"]})
    assert event.weighted_norms == ["rms"] and event.parity_error_train < 1e-13


def test_an_error_inside_leaves_no_weights_behind() -> None:
    run, _ = grown()
    with pytest.raises(RuntimeError):
        run.network.rms(torch.randn(2, 3, dtype=torch.float64))
    x = torch.randn(2, 4, dtype=torch.float64)
    torch.testing.assert_close(nn.LayerNorm(4).double()(x).mean(1), torch.zeros(2, dtype=torch.float64))
    assert run.outputs().isfinite().all()


def test_annealing_is_linear() -> None:
    assert annealed({"x": [0.5, 0.0, 1.0]}, 0.5) == {"x": [0.75, 0.5, 1.0]}
    assert annealed({"x": [0.5]}, 1.0) == {}


def by_mean_square(norm: nn.Module, x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(axis=-1, keepdims=True) + 1e-6)


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
    """Normalise over channels, then by deviations over samples and entries, which stay plain."""
    x = x / (x.std(-1, keepdim=True) + 1e-6)
    return x / (1 + x.std(0) + x.var(axis=0, unbiased=False))


def written(normalise: Callable[[nn.Module, Tensor], Tensor]) -> nn.Module:
    gain, shift = nn.Parameter(torch.rand(16) + 0.5), nn.Parameter(torch.randn(16))
    return Around(lambda net, x: normalise(net, x) * net.gain + net.shift, gain=gain, shift=shift)


@pytest.mark.parametrize("method", [PairGrowth(), VarianceTransfer(), HyperCloning()], ids=lambda m: m.name)
@pytest.mark.parametrize(
    "normalise",
    [by_mean_square, by_standard_deviation, by_variance, by_both_at_once, by_functions_positions, of_samples_too],
)
def test_means_variances_and_deviations_over_channels_are_weighed(
    normalise: Callable[[nn.Module, Tensor], Tensor], method: GrowthMethod
) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(5, 16), written(normalise), nn.Linear(16, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    run = Growing(network, x, method, rough=False)
    assert run.graph.full_widths == {"0": 16}
    before = network(x) * run.state.output_factor
    assert run.grow().parity_error_eval < 1e-12
    torch.testing.assert_close(network(x) * run.state.output_factor, before, rtol=1e-10, atol=1e-10)
    anneal_norms(network, run.graph, run.state, 1.0)
    annealed_outputs = network(x) * run.state.output_factor
    finish(network, run.graph, method, run.state)
    plain = nn.Sequential(nn.Linear(5, 16), written(normalise), nn.Linear(16, 3)).double()
    plain.load_state_dict(network.state_dict())
    torch.testing.assert_close(plain(x), annealed_outputs)


def test_norms_over_other_dimensions_stay_plain_by_numpys_names_too() -> None:
    """torch's functions accept `axis` and `keepdims`."""

    def normalise(norm: nn.Module, x: Tensor) -> Tensor:
        x = 4 * x / torch.linalg.vector_norm(x, axis=-1, keepdims=True)
        return x / (1 + torch.linalg.vector_norm(x, axis=0))

    network = nn.Sequential(nn.Linear(5, 16), written(normalise), nn.Linear(16, 3)).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    run = Growing(network, x, PairGrowth(), rough=False)
    assert run.grow().parity_error_eval < 1e-12


@pytest.mark.parametrize("by_shape", [False, True])
def test_a_scale_behind_a_euclidean_norm_follows_the_channels_or_stays(by_shape: bool) -> None:
    """RMS normalisation by the Euclidean norm, whose scale is a number or follows the number of channels."""
    norm = Around(lambda net, x: F.normalize(x, dim=-1) * (x.shape[-1] if by_shape else 8) ** 0.5)
    network = nn.Sequential(nn.Linear(5, 8), norm, nn.Linear(8, 3)).double()
    run = Growing(network, torch.randn(4, 5, dtype=torch.float64), PairGrowth(), {"0": 2}, rough=False)
    (norm,) = run.graph.channel_norms
    assert norm.summed and norm.counted is by_shape
    event = run.grow()
    assert event.weighted_norms == ["1"] and event.parity_error_eval < 1e-14
    # Halfway, new channels count half; a scale that follows the shape counts the same number of channels.
    anneal_norms(network, run.graph, run.state, 0.5)
    weights = torch.tensor([1.0] * 2 + [0.5] * 6, dtype=torch.float64)
    y = torch.randn(4, 8, dtype=torch.float64)
    total = (y.square() * weights).sum(-1, keepdim=True) * (8 / 5 if by_shape else 1.0)
    torch.testing.assert_close(network[1](y), y * (8 / total).sqrt())
