"""Comparisons with GroMo, the library of TINY's authors, on the same small network and data (`pip install gromo`)."""

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.growth import GradMax, GrowthMethod, PairGrowth, Tiny
from tests.unit.growth.measured import Started, started

pytest.importorskip("gromo", reason="GroMo is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
OLD, NEW, SIDE = 4, 2, 6
STATISTICS = {
    "tiny": {"compute_delta": False},
    "gradmax": {
        **{"compute_delta": False, "use_covariance": False, "alpha_zero": True},
        **{"use_projection": False, "ignore_singular_values": True},
    },
}


def ours(method: GrowthMethod, inputs: int = 6, width: int = 2 * OLD, size: int = 40) -> Started:
    """A network at half of its width."""
    network = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, 3))
    return started(network, (inputs,), method, size=size)


def with_weights_of(run: Started, network: nn.Module) -> nn.Module:
    """Copy the weights of our two layers into GroMo's."""
    with torch.no_grad():
        for layer, place in zip(network.layers, (0, 2), strict=True):
            layer.weight.copy_(run.network[place].weight)
            layer.bias.copy_(run.network[place].bias)
    return network


def theirs(run: Started) -> nn.Module:
    """GroMo's network with our weights."""
    from gromo.containers.growing_mlp import GrowingMLP

    inner = run.network[0]
    network = GrowingMLP(inner.in_features, 3, inner.out_features, 1, activation=nn.Tanh())
    return with_weights_of(run, network.double())


def conv_ours(method: GrowthMethod, inputs: int = 2, width: int = 2 * OLD, size: int = 40, side: int = SIDE) -> Started:
    """Convolutions at half of their widths."""
    layers = nn.Conv2d(inputs, width, 3, padding=1), nn.Tanh(), nn.Conv2d(width, width // 2, 3, padding=1)
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width // 2 * side * side, 3))
    return started(network, (inputs, side, side), method, size=size)


def conv_theirs(run: Started) -> nn.Module:
    """GroMo's convolutions with our weights, and the same head."""
    from gromo.containers.sequential_growing_container import SequentialGrowingModel
    from gromo.modules.conv2d_growing_module import FullConv2dGrowingModule

    class Network(SequentialGrowingModel):
        def __init__(self) -> None:
            one, two = run.network[0], run.network[2]
            super().__init__(in_features=one.in_channels, out_features=3)
            shape = {"kernel_size": 3, "padding": 1, "input_size": run.batches[0][0].shape[2:]}
            widths = one.in_channels, one.out_channels, two.out_channels
            first = FullConv2dGrowingModule(*widths[:2], **shape, post_layer_function=nn.Tanh(), name="first")
            last = FullConv2dGrowingModule(*widths[1:], **shape, previous_module=first, name="last")
            self.layers = nn.ModuleList([first, last])
            self.head = copy.deepcopy(run.network[4])
            self._growable_layers = [last]
            self.set_growing_layers(scheduling_method="all")

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers[1](self.layers[0](x)).flatten(1))

        def extended_forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers[1].extended_forward(*self.layers[0].extended_forward(x))[0].flatten(1))

    return with_weights_of(run, Network().double())


@pytest.fixture
def double() -> Iterator[None]:
    """Set float64 as torch's default dtype, in which GroMo creates tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def grown(
    network: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor]],
    factor: float,
    count: int = NEW,
    held_out: Sequence[tuple[Tensor, Tensor]] = (),
    **options: bool,
) -> nn.Module:
    """Grow GroMo's network as in its tutorials; `held_out` adds the passes of a line search over 0 and `factor`."""
    network.init_computation()
    for x, y in batches:
        network.zero_grad()
        F.cross_entropy(network(x), y).backward()
        network.update_computation()
    network.compute_optimal_updates(maximum_added_neurons=count, dtype=torch.float64, **options)
    network.reset_computation()
    network.select_update(0)
    for tried in (0.0, factor) if held_out else ():
        network.set_scaling_factor(tried)
        loss(network.extended_forward, held_out)
    network.set_scaling_factor(factor)
    network.apply_change()
    return network


def loss(network: Callable[[Tensor], Tensor], batches: Sequence[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        return float(torch.stack([F.cross_entropy(network(x), y) for x, y in batches]).mean())


NETWORKS = [pytest.param(ours, theirs, id="linear"), pytest.param(conv_ours, conv_theirs, id="convolution")]
Makes, Copies = Callable[[GrowthMethod], Started], Callable[[Started], nn.Module]


@pytest.mark.parametrize(("make", "copied"), NETWORKS)
def test_tiny_s_loss_is_no_worse(make: Makes, copied: Copies, double: None) -> None:
    """With the same S, each at its best amplitude on a held-out batch, because GroMo scales neurons differently."""
    factors = [2.0 ** (power / 8) for power in range(-24, 57)]
    # GroMo multiplies both sides of a neuron by its factor.
    run = make(Tiny(amplitudes=[factor**2 for factor in factors], ridge=0.0))
    # Hold out the training batch itself, on which the neurons help most.
    run.batches[1] = run.batches[0]
    start, (shown, held_out) = copied(run), (run.batches[:1], run.batches[1:])
    found = {f: grown(copy.deepcopy(start), shown, f, **STATISTICS["tiny"]) for f in factors}
    best = min(loss(network, held_out) for network in found.values())
    before = loss(run.network, held_out)
    run.grow({"0": OLD + NEW})
    after = loss(run.network, held_out)
    print(f"TINY: loss {before:.5f}, GroMo {best:.5f}, ours {after:.5f}")
    assert best < before and after <= best + 1e-3 * before
    # Incoming weights agree up to sign and length.
    rows, other = (
        torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)[OLD:].detach()
        for layer in (run.network[0], found[1.0].layers[0])
    )
    cosines = F.cosine_similarity(rows, other).abs()
    torch.testing.assert_close(cosines, torch.ones_like(cosines), atol=1e-6, rtol=0)


@pytest.mark.parametrize(("make", "copied"), NETWORKS)
def test_gradmax_s_gradient_and_loss_after_a_step_are_no_worse(make: Makes, copied: Copies, double: None) -> None:
    run = make(GradMax())
    other = grown(copied(run), run.batches, 1.0, **STATISTICS["gradmax"])
    before = loss(run.network, run.batches)
    run.grow({"0": OLD + NEW})
    columns = run.network[2].weight
    with torch.no_grad():
        # Give ours the same lengths as GroMo's, which are 1.
        lengths = [w[:, OLD:].transpose(0, 1).flatten(1).norm(dim=1) for w in (columns, other.layers[1].weight)]
        columns[:, OLD:] *= (lengths[1] / lengths[0]).view(1, -1, *[1] * (columns.dim() - 2))
    reached = []
    for network, inner in ((run.network, run.network[0]), (other, other.layers[0])):
        assert loss(network, run.batches) == pytest.approx(before, rel=1e-9)
        total = torch.stack([F.cross_entropy(network(x), y) for x, y in run.batches]).mean()
        weight, bias = torch.autograd.grad(total, [inner.weight, inner.bias])
        with torch.no_grad():
            inner.weight -= 0.5 * weight
            inner.bias -= 0.5 * bias
        norm = float((weight[OLD:].square().sum() + bias[OLD:].square().sum()).sqrt())
        reached.append((norm, loss(network, run.batches)))
    (our_norm, our_loss), (their_norm, their_loss) = reached
    print(f"GradMax: gradient {our_norm:.5f} (GroMo {their_norm:.5f}), ", end="")
    print(f"loss {before:.5f} -> {our_loss:.5f} ({their_loss:.5f})")
    assert our_norm >= their_norm * (1 - 1e-9)
    assert our_loss <= their_loss + 1e-3 * before


def test_pairs_are_theirs() -> None:
    """With the same random halves, all weights are equal."""
    run = ours(PairGrowth())
    other = theirs(run)
    event, _ = run.grow({"0": OLD + NEW})
    assert event.parity_error_eval < 1e-12
    first, last = other.layers
    first.create_layer_out_extension(NEW)
    last.create_layer_in_extension(NEW)
    half = slice(OLD, OLD + NEW // 2)
    with torch.no_grad():
        first.extended_output_layer.weight[: NEW // 2] = run.network[0].weight[half]
        first.extended_output_layer.bias[: NEW // 2] = run.network[0].bias[half]
        last.extended_input_layer.weight[:, : NEW // 2] = run.network[2].weight[:, half]
    last.apply_neuron_pairing("vv_z_negz", noise_ratio=0.0)
    last.set_scaling_factor(1.0)
    last.apply_change(extension_size=NEW)
    for layer, place in zip(other.layers, (0, 2), strict=True):
        torch.testing.assert_close(layer.weight, run.network[place].weight, rtol=0, atol=0)
        torch.testing.assert_close(layer.bias, run.network[place].bias, rtol=0, atol=0)
