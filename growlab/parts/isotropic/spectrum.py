"""Singular spectra of isotropic layers, and the bases in which they are diagonal (Bird, Section 2.3)."""

import copy
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from growlab.widths import Layer, Part, WidthGraph, rotate, tensors_of


def decompose(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Singular value decomposition U diag(s) V^T of a matrix [n, K] in float64, with unique signs.

    In every left singular vector the entry of largest modulus (the first among equals) is positive.

    Returns:
        U [n, n], orthogonal also if n > K; s [n], descending, 0 beyond the K-th; V [K, n], whose columns beyond the
        K-th are 0.
    """
    matrix = matrix.detach().double()
    rows, columns = matrix.shape
    # U must only be completed if there are more rows than columns; V^T is the smaller matrix then.
    left, values, right = torch.linalg.svd(matrix, full_matrices=rows > columns)
    largest = left.abs().argmax(0, keepdim=True)
    signs = torch.where(left.gather(0, largest) < 0, -1.0, 1.0).to(left)
    missing = rows - len(values)
    right = torch.nn.functional.pad(right[: len(values)].T, (0, missing))
    return left * signs, torch.nn.functional.pad(values, (0, missing)), right * signs


def gather_constant(left: Tensor, values: Tensor, constant: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Rotate the null space's singular vectors so that only the first has a component along a vector [n].

    Singular values s up to `rounding` times the largest count as 0.

    Returns:
        U and s, with these values set to 0.
    """
    null = (values <= rounding * values[0]).nonzero().flatten()
    along = left[:, null].T @ constant
    if len(null) < 2 or not bool(along.any()):
        return left, values
    # A Householder reflection that maps the first singular vector to the vector's direction.
    mirror = along / torch.linalg.vector_norm(along)
    mirror[0] += torch.copysign(torch.ones_like(mirror[0]), mirror[0])
    basis = left[:, null]
    turned = basis - torch.outer(basis @ mirror, mirror) * (2 / mirror.square().sum())
    return left.index_copy(1, null, turned), values.index_fill(0, null, 0.0)


def order_by_square(left: Tensor, values: Tensor, square: Tensor, rounding: float) -> tuple[Tensor, Tensor]:
    """Rotate the null space's singular vectors into descending order of mean square; see `gather_constant`."""
    null = (values <= rounding * values[0]).nonzero().flatten()
    if len(null) < 2:
        return left, values
    basis = left[:, null]
    ascending = torch.linalg.eigh(basis.T @ square.to(basis) @ basis)[1]
    return left.index_copy(1, null, basis @ ascending.flip(1)), values.index_fill(0, null, 0.0)


def producers(graph: WidthGraph, group: str) -> list[Layer]:
    """Return the layers whose output has the group's channels, one per weight."""
    by_weight = {
        layer.weight: layer
        for layer in graph.layers
        if group in graph.axes[layer.weight][0].groups and graph.axes[layer.weight][0].role == "out"
    }
    return list(by_weight.values())


def consumers(graph: WidthGraph, group: str) -> list[Layer]:
    """Return the layers whose input has the group's channels, one per weight and bias."""
    return [
        layer
        for layer in graph.layers
        if len(graph.axes[layer.weight]) > 1
        and group in graph.axes[layer.weight][1].groups
        and graph.axes[layer.weight][1].role == "in"
    ]


def gain_columns(graph: WidthGraph, group: str, layer: Layer, widths: Mapping[str, int]) -> slice | None:
    """Return the columns with which a group's consumer reads the gain channel of its activation, or None.

    They follow the group's columns, as many as one channel has: their weights are the vector psi of W f(x) + psi g + b.
    """
    radii = [radius for radius in graph.radii if group in radius.groups]
    # With several producers or activations, these columns may belong to something else.
    if len(radii) != 1 or not radii[0].gain_channel or len(producers(graph, group)) != 1:
        return None
    parts = graph.axes[layer.weight][1].parts
    positions = [index for index, part in enumerate(parts) if part.group == group]
    if len(positions) != 1 or positions[0] + 1 == len(parts):
        return None
    channels, gain = parts[positions[0] : positions[0] + 2]
    if channels.outer != 1 or gain.group is not None or gain.length(widths) < channels.inner:
        return None
    start = sum(part.length(widths) for part in parts[: positions[0] + 1])
    return slice(start, start + channels.inner)


def folded(graph: WidthGraph, groups: Collection[str], multipliers: Mapping[str, Sequence[float]]) -> dict[str, Tensor]:
    """Row multipliers of weights that carry any of these groups, float64, in shapes that broadcast with the weights."""
    factors = {}
    for layer in graph.layers:
        axes = graph.axes[layer.weight]
        if layer.weight in multipliers and any(group in axis.groups for axis in axes for group in groups):
            shape = [1] * len(axes)
            shape[1 if layer.transposed else 0] = -1
            factors[layer.weight] = torch.tensor(list(multipliers[layer.weight]), dtype=torch.float64).view(shape)
    return factors


def weights_of(
    graph: WidthGraph, group: str, tensors: Mapping[str, Tensor], widths: Mapping[str, int], forward: bool = True
) -> Tensor:
    """Concatenate the incoming weights of each channel of a group, or the outgoing ones: [width, K].

    These are the rows of its producers, or the columns of its consumers; layers without `tensors` are left out.
    """
    layers, dim = (producers(graph, group), 0) if forward else (consumers(graph, group), 1)
    blocks = []
    for name in dict.fromkeys(layer.weight for layer in layers if layer.weight in tensors):
        axis, weight = graph.axes[name][dim], tensors[name].detach().movedim(dim, 0)
        pieces = weight.split([part.length(widths) for part in axis.parts], 0)
        for part, piece in zip(axis.parts, pieces, strict=True):
            if part.group == group:
                shaped = piece.reshape(part.outer, widths[group], part.inner, -1)
                blocks.append(shaped.movedim(1, 0).flatten(1))
    return torch.cat(blocks, 1)


def spectra(graph: WidthGraph, tensors: Mapping[str, Tensor], widths: Mapping[str, int]) -> dict[str, Tensor]:
    """Singular values [width] of the incoming weights of each isotropic group, descending."""
    return {
        group: decompose(weights_of(graph, group, tensors, widths))[1]
        for group in graph.isotropic
        if producers(graph, group)
    }


def diagonalise_partially(
    model: nn.Module, graph: WidthGraph, group: str, widths: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Rotate a group's basis so that its producer is W' = S V^T, with orthogonal rows of decreasing norm (Eq. 25).

    **Preserves** the output exactly, up to rounding. Changes the network in place; its graph must be traced with
    `follow_norms`. Returns the rotation by group; `rotate` with its transpose undoes it.
    """
    widths = widths or graph.full_widths
    left, _, _ = decompose(weights_of(graph, group, tensors_of(model, graph), widths))
    rotations = {group: left.T}
    rotate(model, graph, rotations, widths)
    return rotations


def diagonal_groups(graph: WidthGraph, layer: Layer) -> tuple[str, str] | None:
    """Return the input's and the output's group of a layer that can be diagonalised, or None.

    They must be isotropic and different, and the layer must map whole channels to whole channels: a linear layer or a
    1x1 convolution.
    """
    axes = graph.axes[layer.weight]
    if layer.depthwise or any(axis.parts != (Part(None),) for axis in axes[2:]):
        return None
    parts = [axis.parts for axis in axes[:2]]
    if any(len(p) != 1 or p[0].group not in graph.isotropic or p[0] != Part(p[0].group) for p in parts):
        return None
    out, into = parts[0][0].group, parts[1][0].group
    assert out is not None and into is not None
    return None if out == into else (into, out)


def diagonalise(
    model: nn.Module, graph: WidthGraph, layer: Layer, widths: Mapping[str, int] | None = None
) -> dict[str, Tensor]:
    """Rotate the bases on both sides of a layer so that its weight is diagonal, W2' = S (Eqs. 13-18).

        W2 = U S V^T;  W1' = V^T W1, b1' = V^T b1;  W2' = S, b2' = U^T b2;  W3' = W3 U

    **Preserves** the output exactly, up to rounding. Changes the network in place; its graph must be traced with
    `follow_norms`. Returns the rotations by group; `rotate` with their transposes undoes it.

    Raises:
        ValueError: the layer is not between two isotropic groups.
    """
    groups = diagonal_groups(graph, layer)
    if groups is None:
        raise ValueError(f"{layer.name} cannot be made diagonal: it does not join two isotropic groups")
    into, out = groups
    weight = tensors_of(model, graph)[layer.weight].flatten(1)
    left, values, right = decompose(weight)
    # V needs as many columns as there are inputs; those without a singular value are arbitrary.
    right = right[:, : min(weight.shape)]
    if weight.shape[1] > len(values):
        right = torch.cat([right, torch.linalg.svd(right, full_matrices=True)[0][:, right.shape[1] :]], 1)
    rotations = {into: right.T, out: left.T}
    rotate(model, graph, rotations, widths)
    with torch.no_grad():
        # Remove rounding errors off the diagonal.
        exact = tensors_of(model, graph)[layer.weight]
        diagonal = torch.diag_embed(values[: min(weight.shape)]).to(exact)
        exact.zero_()
        exact.flatten(1)[: len(diagonal), : len(diagonal)] = diagonal
    return rotations


class Diagonal(nn.Module):
    """Linear layer with a diagonal matrix: y_i = weight_i x_i + bias_i.

    Inputs beyond the diagonal are not used; outputs beyond it are only the bias.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.ones(min(in_features, out_features)))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., in_features] to [..., out_features]."""
        used = len(self.weight)
        if self.in_features > used:
            x = x[..., :used]
        if self.out_features > used:
            x = nn.functional.pad(x * self.weight, (0, self.out_features - used))
            return x if self.bias is None else x + self.bias
        return x * self.weight if self.bias is None else torch.addcmul(self.bias, x, self.weight)

    def extra_repr(self) -> str:
        """Return the arguments for `repr`."""
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}"


def sparsify(model: nn.Module, graph: WidthGraph, widths: Mapping[str, int] | None = None) -> nn.Module:
    """Return an equivalent network in which as many linear layers as possible are diagonal.

    A layer becomes diagonal by rotating the bases on both sides, so only every other layer of a chain can be. Of two
    layers that exclude one another the larger is chosen; of equal ones, the first.

    **Preserves** the output exactly, up to rounding.

    Args:
        model: an isotropic network; left unchanged.
        graph: its width graph, traced with `follow_norms`.
        widths: width of each group; None for full widths.

    Returns:
        A copy with `Diagonal` in place of those layers. `densify` converts them back.
    """
    sparse = copy.deepcopy(model)
    modules = dict(sparse.named_modules())
    weights = [layer.weight for layer in graph.layers]
    rotated: set[str] = set()

    def saved(layer: Layer) -> int:
        weight = modules[layer.name].weight
        return int(weight.numel() - min(weight.shape))

    candidates = [
        layer
        for layer in graph.layers
        if type(modules.get(layer.name)) is nn.Linear and weights.count(layer.weight) == 1
    ]
    for layer in sorted(candidates, key=saved, reverse=True):
        groups = diagonal_groups(graph, layer)
        if groups is None or rotated & set(groups):
            continue
        rotated |= set(groups)
        diagonalise(sparse, graph, layer, widths)
        dense = modules[layer.name]
        vector = Diagonal(dense.in_features, dense.out_features, dense.bias is not None).to(dense.weight)
        with torch.no_grad():
            vector.weight.copy_(dense.weight.diagonal())
            if vector.bias is not None:
                vector.bias.copy_(dense.bias)
        sparse.set_submodule(layer.name, vector.train(dense.training))
    return sparse


def densify(model: nn.Module) -> nn.Module:
    """Return a copy of the network with every `Diagonal` replaced by a linear layer."""
    dense = copy.deepcopy(model)
    for name, module in list(dense.named_modules()):
        if isinstance(module, Diagonal):
            linear = nn.Linear(module.in_features, module.out_features, module.bias is not None)
            linear = linear.to(module.weight)
            with torch.no_grad():
                linear.weight.zero_()
                linear.weight.diagonal().copy_(module.weight)
                if module.bias is not None and linear.bias is not None:
                    linear.bias.copy_(module.bias)
            dense.set_submodule(name, linear.train(module.training))
    return dense
