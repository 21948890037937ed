"""Convert every other layer of an isotropic network to a diagonal one (Bird, Section 2.3.1, Eq. 19)."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from growlab.parts.isotropic.spectrum import diagonal_groups, diagonalise
from growlab.widths import Layer, WidthGraph


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
    layers that exclude one another the larger is chosen, of equal ones the first.

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
    taken: set[str] = set()

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
        if groups is None or taken & set(groups):
            continue
        taken |= set(groups)
        diagonalise(sparse, graph, layer, widths)
        dense = modules[layer.name]
        vector = Diagonal(dense.in_features, dense.out_features, dense.bias is not None).to(dense.weight)
        with torch.no_grad():
            vector.weight.copy_(dense.weight.diagonal())
            if vector.bias is not None:
                vector.bias.copy_(dense.bias)
        _replace(sparse, layer.name, vector.train(dense.training))
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
            _replace(dense, name, linear.train(module.training))
    return dense


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, module)
