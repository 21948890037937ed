"""Diagonalised and sparsified networks compute the same with fewer parameters (Eqs. 13-25 and 19)."""

import copy

import pytest
import torch
from torch import Tensor, nn

from growlab.parts.isotropic import (
    Diagonal,
    IsotropicCNN,
    IsotropicMLP,
    densify,
    diagonalise,
    diagonalise_partially,
    isotropic_mlp,
    sparsify,
    spectra,
)
from growlab.parts.isotropic.spectrum import decompose, producers
from growlab.widths import WidthGraph, rotate, trace
from tests.cases import outputs, roughen


def made(network: nn.Module, *shape: int) -> tuple[nn.Module, WidthGraph, Tensor]:
    """The network in float64 with statistics of its own, its graph and a batch."""
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
    """Wider than high, higher than wide, a 1x1 convolution out of a residual stream."""
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
    assert all(torch.equal(value, state[key]) for key, value in network.state_dict().items())
    assert [type(m) for m in again.modules()] == [type(m) for m in network.modules()]
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in state.items()}
    diagonals = sum(isinstance(module, Diagonal) for module in sparse.modules())
    assert diagonals == {"mlp": 2, "mlp chi": 1}.get(name, 0)


def test_an_element_wise_network_is_left_alone() -> None:
    network, graph, _ = made(isotropic_mlp((1, 2, 3), 3, 5, 3, activation="elementwise_tanh"), 1, 2, 3)
    assert graph.isotropic == () and spectra(graph, {}, graph.full_widths) == {}
    assert not any(isinstance(module, Diagonal) for module in sparsify(network, graph).modules())
    with pytest.raises(ValueError, match=r"cannot be rotated: tanh in module hidden\.1"):
        rotate(network, graph, {"hidden.0": torch.eye(5)})
    with pytest.raises(ValueError, match="cannot be made diagonal"):
        diagonalise(network, graph, graph.layers[1])


def test_norms_are_followed_only_on_request() -> None:
    """Other growth methods would change what a norm measures."""
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
    # The same function of another basis of the inputs: signs do not depend on V.
    turned = torch.linalg.qr(torch.randn(shape[1], shape[1], generator=source).double())[0]
    again = decompose(matrix.double() @ turned)[0]
    rank = min(shape)
    assert torch.allclose(again[:, :rank], left[:, :rank], atol=1e-9)
