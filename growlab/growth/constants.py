"""Tensors other than plain weights: constants, weights that are stored in another form, and padding rows.

Constants of growing channels (`WidthGraph.constants`) are not trained: position tables [T, C] in a buffer or in a plain
attribute of a module, frozen embeddings, statistics of frozen normalisations. At C' channels the network has their
first C' columns; new channels get their original columns back. So a new channel cannot be an exact copy of an old one,
and growth methods set the weights that read it to zero at first (`GrowthContext.unlike`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from growlab.base.pieces import OneByOne, placed, whole
from growlab.widths import WidthGraph, grid

# Smallest norm of v in a weight g v / |v|.
_SHORTEST = 1e-6


def kept(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a full-width network's constants, on the CPU."""
    present = (name for name in graph.constants if name in tensors and not tensors[name].is_meta)
    return {name: tensors[name].detach().cpu().clone() for name in present}


def unchanged(
    graph: WidthGraph, constants: Mapping[str, Tensor], tensors: Mapping[str, Tensor], widths: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the constants that still have their values; one that was written to grows like any other tensor."""
    return {
        name: full
        for name, full in constants.items()
        if name in graph.constants
        and name in tensors
        and torch.equal(tensors[name], at_widths(graph, name, full, widths, tensors[name]))
    }


def at_widths(graph: WidthGraph, name: str, constant: Tensor, widths: Mapping[str, int], like: Tensor) -> Tensor:
    """Return a constant at these widths, on the device of `like`; entries beyond full width are those of `like`."""
    positions = [axis.kept(graph.full_widths, widths) for axis in graph.axes[name]]
    result = like.detach().clone()
    present = constant[grid([(p >= 0).nonzero().flatten() for p in positions], constant.device)]
    result[grid([p[p >= 0] for p in positions], result.device)] = present.to(result)
    return result


def as_applied(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors as the forward applies them, for growth methods to scale and draw.

    Offsets are added. For a weight normalisation w = g v / |v|, v is replaced by w, and g by the ratio |v| / g, which
    does not affect the function.

    Tensors that are applied as stored stay the same objects; the others become float64. `as_stored` is the inverse.
    """

    def applied(name: str) -> Tensor:
        if name in graph.offsets:
            return _precise(tensors[name]) + graph.offsets[name]
        v, g, dim = _normalised(graph, tensors, name)
        if name in graph.weight_norms:
            return torch._weight_norm(v, g, dim)
        ratio = torch.norm_except_dim(v, 2, dim) / g
        return torch.where(ratio.isfinite(), ratio, 1.0)

    return _converted(graph, tensors, applied)


def as_stored(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors as the network stores them: the inverse of `as_applied`, in float64.

    Zero rows of a normalised weight get g = 0 and a random v, drawn with a fixed seed.
    """

    def stored(name: str) -> Tensor:
        if name in graph.offsets:
            return _precise(tensors[name]) - graph.offsets[name]
        weight, ratio, dim = _normalised(graph, tensors, name)
        length = torch.norm_except_dim(weight, 2, dim)
        if name in graph.lengths:
            return torch.where(ratio < 0, -length, length)
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
        # |v|^2 must not underflow in the precision of training.
        ratio = torch.where((length * ratio).abs() < _SHORTEST, 1.0 / length, ratio)
        return torch.where(length == 0, drawn, weight * ratio)

    return _converted(graph, tensors, stored)


def add(graph: WidthGraph, tensors: Mapping[str, Tensor], noise: Mapping[str, Tensor]) -> None:
    """Add noise, by name, to a network's tensors as the forward applies them, in place."""
    for name, amount in noise.items():
        if name not in graph.weight_norms:
            tensors[name].add_(placed(amount, tensors[name]))
            continue
        applied = as_applied(graph, {key: whole(tensors[key]) for key in (name, graph.weight_norms[name][0])})
        noisy = {**applied, name: applied[name] + amount.to(applied[name])}
        for key, stored in as_stored(graph, noisy).items():
            tensors[key].copy_(placed(stored, tensors[key]))


def _normalised(graph: WidthGraph, tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, int]:
    """Return v, g and the dimension of a weight normalisation, given the name of either tensor."""
    direction = name if name in graph.weight_norms else graph.lengths[name]
    length, dim = graph.weight_norms[direction]
    return _precise(tensors[direction]), _precise(tensors[length]), dim


def _precise(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _converted(
    graph: WidthGraph, tensors: Mapping[str, Tensor], convert: Callable[[str], Tensor]
) -> Mapping[str, Tensor]:
    names = [n for n in (*graph.offsets, *graph.weight_norms, *graph.lengths) if n in tensors]
    if not isinstance(tensors, OneByOne):
        return {**tensors, **{name: convert(name) for name in names}} if names else tensors
    like = None if tensors.like is None else {**tensors.like, **{n: _precise(tensors.like[n]) for n in names}}
    return OneByOne(tensors, lambda name: convert(name) if name in names else tensors[name], like)


def padding_kept(model: nn.Module, old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the new tensors with padding rows set to zero where they were zero before.

    No gradient reaches a padding row, so entries drawn there would never be trained. A row that is not zero (it is
    trained if the table is tied to an output layer) is left unchanged.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rows = {
        names.get(id(module.weight), ""): module.padding_idx
        for module in model.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.padding_idx is not None
    }
    if rows.keys().isdisjoint(new):
        return new

    def padded(name: str) -> Tensor:
        if name not in rows or new[name] is old[name] or bool(old[name][rows[name]].any()):
            return new[name]
        kept = new[name].detach().clone()
        kept[rows[name]] = 0
        return kept

    return OneByOne(new, padded)
