"""Isotropic primitives commute with rotations, are smooth at 0, nest, and become diagonal."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from growlab.parts.isotropic import (
    Blend,
    ChiNorm,
    Diagonal,
    IntrinsicLength,
    IsotropicActivation,
    IsotropicCNN,
    IsotropicMLP,
    NestedNetwork,
    densify,
    diagonalise,
    diagonalise_partially,
    isotropic_cnn,
    isotropic_mlp,
    isotropic_nested,
    nested,
    sparsify,
    spectra,
)
from growlab.parts.isotropic.activations import GAINS, tanh_gain
from growlab.parts.isotropic.spectrum import decompose, producers
from growlab.widths import WidthGraph, rotate, trace
from tests.cases import differing, outputs, roughen

KINDS = list(GAINS)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(seed: int, n: int) -> Tensor:
    """An orthogonal matrix, reflections included."""
    return torch.linalg.qr(drawn(seed, n, n))[0]


def rotated(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("ij,bj...->bi...", matrix, x)


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    length=st.sampled_from([None, 1e-6, 0.3, 20.0]),
    width=st.integers(1, 9),
    space=st.sampled_from([(), (3,), (2, 3)]),
    scale=st.sampled_from([1e-8, 1e-2, 1.0, 50.0]),
    seed=st.integers(0, 100),
)
def test_activations_commute_with_every_rotation(kind, length, width, space, scale, seed):
    """f(R x) = R f(x), also with an intrinsic length, for vectors and for channels of images."""
    f, matrix = IsotropicActivation(kind, length).double(), rotation(seed, width)
    x = scale * drawn(seed + 1, 4, width, *space)
    assert torch.allclose(f(rotated(matrix, x)), rotated(matrix, f(x)), rtol=1e-12, atol=1e-14 * scale)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("space", [(), (2, 3)])
def test_the_chi_normaliser_commutes_with_rotations_and_keeps_lengths_apart(training, space):
    matrix, x = rotation(0, 5), 3 * drawn(1, 6, 5, *space) + 2
    one, other = ChiNorm(5).double(), ChiNorm(5).double()
    one(x), other(rotated(matrix, x))  # running statistics of both
    one.train(training), other.train(training)
    y = one(x)
    assert torch.allclose(other(rotated(matrix, x)), rotated(matrix, y), atol=1e-12)
    lengths = torch.linalg.vector_norm(y, dim=1)
    assert lengths.std() > 0.1
    if training:
        assert torch.allclose(lengths.square().mean(), torch.tensor(5.0).double(), rtol=1e-4)
        assert torch.allclose(y.mean([d for d in range(y.dim()) if d != 1]), torch.zeros(5).double())


@pytest.mark.parametrize("start", [-3.0, -0.5, 0.0, 2.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_signed_length_commutes_and_has_the_norm_of_its_definition(kind, start):
    f = IsotropicActivation(kind, IntrinsicLength(start, "signed")).double()
    x, matrix = drawn(0, 6, 4), rotation(1, 4)
    assert torch.allclose(f(rotated(matrix, x)), rotated(matrix, f(x)), rtol=1e-12)
    square = (x.square().sum(1, keepdim=True) + start).abs()
    assert torch.allclose(f(x), GAINS[kind](square) * x)
    f(x).sum().backward()
    assert torch.isfinite(f.length.grad) and f.length.grad != 0


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("make", [isotropic_mlp, isotropic_cnn])
def test_orthogonal_weights_have_singular_values_of_1_and_no_biases(make, gain):
    options = {"depth": 2} if make is isotropic_mlp else {"pools": (2, 2)}
    network = make((3, 8, 8), 10, width=6, gain_channel=gain, weights="orthogonal", **options)
    layers = [module for module in network.modules() if hasattr(module, "weight")]
    assert len(layers) == 3
    for index, layer in enumerate(layers):
        own = layer.weight[:, :-1] if gain and index else layer.weight
        values = torch.linalg.svdvals(own.flatten(1))
        assert torch.allclose(values, torch.ones_like(values), atol=1e-5)
        assert layer.bias.count_nonzero() == 0
        assert not gain or index == 0 or layer.weight[:, -1].count_nonzero() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [None, 1e-30, 1e-4, 0.5])
def test_gradients_at_and_around_zero(kind, length):
    """Finite differences agree at x = 0 and on both sides of the series' limit."""
    f = IsotropicActivation(kind, length).double()
    if f.log_length is not None:
        f.log_length.requires_grad_(length > 1e-20)
    inputs = [torch.zeros(2, 3, dtype=torch.float64), 0.03 * drawn(0, 2, 3), drawn(1, 2, 3, 2)]
    inputs.append(torch.full((1, 1), math.sqrt(1e-3), dtype=torch.float64))
    for x in inputs:
        x.requires_grad_()
        assert torch.autograd.gradcheck(f, (x,))
        assert torch.isfinite(torch.autograd.grad(f(x).sum(), x)[0]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_series_and_the_formula_meet(dtype):
    """Relative error against an independent evaluation; and the slope, which cancels without the series."""
    square = torch.logspace(-12, 2, 400, dtype=torch.float64)
    radius = square.sqrt()
    x = square.to(dtype).requires_grad_()
    gain = tanh_gain(x)
    (slope,) = torch.autograd.grad(gain.sum(), x)
    assert torch.allclose(gain.double(), torch.tanh(radius) / radius, rtol=20 * torch.finfo(dtype).eps)
    # d/ds tanh(r)/r, by a series where the closed form cancels.
    closed = (radius / torch.cosh(radius).square() - torch.tanh(radius)) / (2 * radius**3)
    exact = torch.where(square < 1e-4, -1 / 3 + 4 / 15 * square, closed)
    assert torch.allclose(slope.double(), exact, rtol=1e-3 if dtype is torch.float32 else 1e-6)


def test_isotropic_tanh_is_the_papers():
    """Eq. 37, and Eq. 29 with an intrinsic length."""
    x = drawn(0, 5, 4)
    norm = torch.linalg.vector_norm(x, dim=1, keepdim=True)
    assert torch.allclose(IsotropicActivation("tanh", None)(x), torch.tanh(norm) * x / norm)
    longer = (norm**2 + 0.7).sqrt()
    assert torch.allclose(IsotropicActivation("tanh", 0.7).double()(x), torch.tanh(longer) / longer * x)


@pytest.mark.parametrize(
    ("kind", "dtype", "autocast"),
    [
        *(("tanh", torch.float16, False), ("tanh", torch.bfloat16, True), ("softsign", torch.float16, True)),
        *(("softsign", torch.bfloat16, False), ("leaky", torch.float16, True)),
    ],
)
def test_long_vectors_in_half_precision(kind, dtype, autocast):
    """Norms of 1e-3 to 3e4: in float16 squares overflow from 256 on and underflow at 1e-4."""
    x = torch.nn.functional.normalize(drawn(0, 6, 8)) * torch.logspace(-3, 4.5, 6).double()[:, None]
    x = x.to(dtype)
    f, exact = IsotropicActivation(kind, 0.3), IsotropicActivation(kind, 0.3).double()
    with torch.autocast("cpu", dtype, autocast):
        y = (f if autocast else f.to(dtype))(x.requires_grad_())
        assert y.dtype is dtype and torch.isfinite(torch.autograd.grad(y.sum(), x)[0]).all()
        if autocast:
            # A float32 input is not rounded to half precision.
            wide = f(x.detach().float())
            assert torch.allclose(wide.double(), exact(x.detach().double()), rtol=1e-5, atol=1e-7)
    # ln o is rounded like the other parameters.
    tolerance = torch.finfo(dtype).eps * (1 if autocast else 3)
    assert torch.allclose(y.double(), exact(x.double()), rtol=tolerance, atol=torch.finfo(dtype).tiny)


@pytest.mark.parametrize(
    ("make", "dtype", "autocast"),
    [
        *((isotropic_mlp, torch.float16, False), (isotropic_mlp, torch.bfloat16, True)),
        *((isotropic_cnn, torch.float16, True), (isotropic_cnn, torch.bfloat16, False)),
        *((isotropic_nested, torch.float16, True), (isotropic_nested, torch.bfloat16, False)),
    ],
)
def test_networks_in_half_precision_follow_those_in_single_precision(make, dtype, autocast):
    """Inputs have norm 2000; normalisers keep the same statistics, also under autocast."""
    torch.manual_seed(0)
    network = make((3, 8, 8), 4, width=4, **({} if make is isotropic_nested else {"chi_norm": True}))
    half, x = copy.deepcopy(network), 300 * torch.randn(16, 3, 8, 8)
    for training in (True, False):
        expected = network.train(training)(x)
        with torch.autocast("cpu", dtype, autocast):
            half = half if autocast else half.to(dtype)
            found = half.train(training)(x.to(dtype))
        assert found.dtype is dtype
        error = (found.float() - expected).abs().max() / expected.abs().max()
        assert error < 10 * torch.finfo(dtype).eps
    for one, other in zip(half.buffers(), network.buffers(), strict=True):
        assert torch.allclose(one.float(), other, rtol=4 * torch.finfo(dtype).eps, atol=3.0)


def test_a_blend_goes_from_the_identity_to_the_activation():
    f, x = IsotropicActivation("tanh"), torch.randn(4, 3)
    assert torch.equal(Blend(f)(x), x)
    assert torch.allclose(Blend(f, 0.0)(x), f(x))


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("kind", ["tanh", "leaky"])
def test_a_nested_network_equals_the_dense_one(depth, kind):
    """Eqs. 39-45: one matrix product of the input, biases and all."""
    torch.manual_seed(0)
    dense = IsotropicMLP(6, [5, 4, 3][:depth], 2, kind, 0.2).double()
    x = drawn(0, 7, 6)
    assert torch.allclose(nested(dense)(x), dense(x), atol=1e-13)


@pytest.mark.parametrize("make", [isotropic_mlp, isotropic_cnn])
def test_a_gain_channel_changes_nothing_at_first_and_gets_a_gradient(make):
    """The output is W f(x) + psi g + b, with psi = 0 at first; the activation's last channel is g."""
    networks, x = [], torch.randn(5, 2, 8, 8)
    for gain_channel in (False, True):
        torch.manual_seed(0)
        networks.append(make((2, 8, 8), 3, width=4, gain_channel=gain_channel))
    plain, network = networks
    assert torch.allclose(network(x), plain(x), atol=1e-6)
    network(x).sum().backward()
    assert network.classifier.weight.grad[:, -1].abs().min() > 0
    f, inputs = IsotropicActivation("tanh", 0.3, gain_channel=True), torch.randn(5, 4, 2)
    assert torch.equal(f(inputs)[:, :4], f.gain(inputs) * inputs) and torch.equal(f(inputs)[:, 4:], f.gain(inputs))


def test_the_nested_network_is_its_formula():
    """Eq. 47 written out for two hidden levels of different widths."""
    torch.manual_seed(0)
    network, x = NestedNetwork(6, [5, 4], 3).double(), drawn(0, 7, 6)
    z = iter(network.affine(x).split([5, 4, 4, 3, 3, 3], dim=1))
    g1 = network.activations[0].gain(next(z))
    x2 = next(z) + g1 * next(z)
    g2 = network.activations[1].gain(x2)
    assert torch.allclose(network(x), next(z) + g1 * next(z) + g1 * g2 * next(z))


def test_an_element_wise_twin_differs_only_in_the_activation():
    states = []
    for activation in ("tanh", "elementwise_tanh"):
        torch.manual_seed(0)
        network = isotropic_mlp((3, 4, 4), 10, width=6, depth=2, activation=activation, length=None)
        states.append(network.state_dict())
    assert not differing(*states)


def made(network: nn.Module, *shape: int) -> tuple[nn.Module, WidthGraph, Tensor]:
    """The network in float64 with random statistics, its graph and a batch."""
    network = network.double()
    roughen(network)
    x = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return network, trace(network, x[:2], follow_norms=True), x


class OneByOne(nn.Module):
    """A residual stream with 1x1 convolutions, a concatenation and a flattened end."""

    def __init__(self) -> None:
        super().__init__()
        self.cnn = IsotropicCNN(2, [5, 6], [1, 2], 3).features
        self.branch, self.back = nn.Conv2d(6, 7, 1), nn.Conv2d(7, 6, 1)
        self.activation = IsotropicCNN(2, [5], [1], 3).features[-1]
        self.end = nn.Linear(13 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.cnn(x)
        y = self.activation(self.branch(x))
        x = torch.cat([x + self.back(y), y], 1)
        return self.end(torch.flatten(x, 1))


NETWORKS = {
    "mlp": lambda: made(IsotropicMLP(6, [5, 8, 4, 7], 3), 6),
    "mlp chi": lambda: made(IsotropicMLP(6, [9, 5], 3, "leaky", None, chi_norm=True), 6),
    "cnn": lambda: made(IsotropicCNN(2, [4, 6], [2, 1], 3), 2, 4, 4),
    "residual": lambda: made(OneByOne(), 2, 4, 4),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_partial_diagonalisation_and_its_inverse(name: str, training: bool) -> None:
    network, graph, x = NETWORKS[name]()
    expected = outputs(network, x, training)
    parameters = dict(network.named_parameters())
    groups = [group for group in graph.isotropic if producers(graph, group)]
    assert len(groups) >= 2
    for group in groups:
        before = copy.deepcopy(network.state_dict())
        rotations = diagonalise_partially(network, graph, group)
        assert torch.allclose(outputs(network, x, training), expected, rtol=1e-10, atol=1e-10)
        assert not torch.allclose(network.state_dict()[f"{group}.weight"], before[f"{group}.weight"])
        if len(producers(graph, group)) == 1:
            rows = dict(network.named_parameters())[f"{group}.weight"].flatten(1)
            gram = rows @ rows.T
            assert torch.allclose(gram, torch.diag(gram.diagonal()), atol=1e-12), "rows are not orthogonal"
            assert torch.allclose(gram.diagonal().sort(descending=True)[0], gram.diagonal()), "nor sorted"
        rotate(network, graph, {group: rotations[group].T})
        for key, value in network.state_dict().items():
            assert torch.allclose(value, before[key], atol=1e-12), key
        diagonalise_partially(network, graph, group)
    assert torch.allclose(outputs(network, x, training), expected, rtol=1e-10, atol=1e-10)
    assert all(p is parameters[n] for n, p in network.named_parameters()), "parameters stay the same objects"


@pytest.mark.parametrize(
    ("name", "layer", "training"),
    [
        *(("mlp", "hidden.2", False), ("mlp", "hidden.4", False), ("mlp", "hidden.6", True)),
        *(("mlp chi", "hidden.3", True), ("residual", "branch", True)),
    ],
)
def test_full_diagonalisation_and_its_inverse(name: str, layer: str, training: bool) -> None:
    """Wide matrices, tall matrices, and a 1x1 convolution that reads a residual stream."""
    network, graph, x = NETWORKS[name]()
    expected, before = outputs(network, x, training), copy.deepcopy(network.state_dict())
    chosen = next(one for one in graph.layers if one.name == layer)
    rotations = diagonalise(network, graph, chosen)
    assert torch.allclose(outputs(network, x, training), expected, rtol=1e-10, atol=1e-10)
    weight = network.get_submodule(layer).weight.detach().flatten(1)
    square = weight[: min(weight.shape), : min(weight.shape)]
    assert weight.count_nonzero() == min(weight.shape) and torch.equal(square, torch.diag(square.diagonal()))
    assert torch.allclose(square.diagonal(), torch.linalg.svdvals(before[f"{layer}.weight"].flatten(1)))
    rotate(network, graph, {group: matrix.T for group, matrix in rotations.items()})
    for key, value in network.state_dict().items():
        assert torch.allclose(value, before[key], atol=1e-12), key


@pytest.mark.parametrize(("depth", "width"), [(1, 7), (2, 16), (5, 2)])
def test_parameters_left_are_equation_19(depth: int, width: int) -> None:
    """2D + 1 maps of width N, intrinsic lengths aside."""
    network, graph, x = made(IsotropicMLP(width, [width] * (2 * depth), width, length=None), width)
    sparse = sparsify(network, graph)
    D, N = depth, width
    part = (2 * D * N + N * (D + 1) * (N + 1)) / (N * (2 * D + 1) * (N + 1))
    counts = [sum(p.numel() for p in net.parameters()) for net in (network, sparse)]
    assert counts[0] == N * (2 * D + 1) * (N + 1)
    assert counts[1] == pytest.approx(part * counts[0], abs=1e-6)
    assert torch.allclose(sparse(x), network(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", NETWORKS)
def test_sparse_and_dense_again_compute_the_same(name: str) -> None:
    network, graph, x = NETWORKS[name]()
    state = copy.deepcopy(network.state_dict())
    sparse = sparsify(network, graph)
    again = densify(sparse)
    for net in (sparse, again):
        assert torch.allclose(outputs(net, x, False), outputs(network, x, False), rtol=1e-10, atol=1e-10)
    assert not differing(state, network.state_dict())
    assert [type(m) for m in again.modules()] == [type(m) for m in network.modules()]
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in state.items()}
    diagonals = sum(isinstance(module, Diagonal) for module in sparse.modules())
    assert diagonals == {"mlp": 2, "mlp chi": 1}.get(name, 0)


def test_an_element_wise_network_is_unchanged() -> None:
    network, graph, _ = made(isotropic_mlp((1, 2, 3), 3, 5, 3, activation="elementwise_tanh"), 1, 2, 3)
    assert graph.isotropic == () and spectra(graph, {}, graph.full_widths) == {}
    assert not any(isinstance(module, Diagonal) for module in sparsify(network, graph).modules())
    with pytest.raises(ValueError, match=r"cannot be rotated: tanh in module hidden\.1"):
        rotate(network, graph, {"hidden.0": torch.eye(5)})
    with pytest.raises(ValueError, match="cannot be made diagonal"):
        diagonalise(network, graph, graph.layers[1])


def test_norms_are_followed_only_on_request() -> None:
    """Other growth methods would change the norms."""
    network, graph, x = made(isotropic_mlp((1, 2, 3), 3, 5, 2), 1, 2, 3)
    assert len(graph.groups) == 2
    plain = trace(network, x[:2])
    assert plain.groups == {} and "vecdot" in plain.fixed["hidden.0"]
    with pytest.raises(ValueError, match="no norm over these channels was followed"):
        rotate(network, plain, {"hidden.0": torch.eye(5)})


@pytest.mark.parametrize("shape", [(4, 4), (3, 7), (7, 3), (5, 1), (1, 5)])
def test_decomposition(shape: tuple[int, int]) -> None:
    source = torch.Generator().manual_seed(0)
    matrix = torch.randn(shape, generator=source)
    left, values, right = decompose(matrix)
    rows = shape[0]
    assert left.dtype == torch.float64
    assert torch.allclose(left @ torch.diag(values) @ right.T, matrix.double(), atol=1e-12)
    assert torch.allclose(left.T @ left, torch.eye(rows).double(), atol=1e-12)
    assert (left.gather(0, left.abs().argmax(0, keepdim=True)) > 0).all(), "signs are not fixed"
    assert torch.equal(values, values.sort(descending=True)[0]) and len(values) == rows
    # The same function in another basis of the inputs: signs do not depend on V.
    basis = torch.linalg.qr(torch.randn(shape[1], shape[1], generator=source).double())[0]
    again = decompose(matrix.double() @ basis)[0]
    rank = min(shape)
    assert torch.allclose(again[:, :rank], left[:, :rank], atol=1e-9)
