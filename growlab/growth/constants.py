"""Tensors that are no plain weights: constants, weights that are stored in another form, and padding rows.

Constants of growing channels (`WidthGraph.constants`) end training as they began it.

A table of positions [T, C] in a buffer or in a plain attribute of a module, a frozen embedding, the statistics of a
frozen normalisation: at C' channels the network has the first C' columns, and those of channels that arrive come back
as they were. So no new channel can equal an old one, or a twin: growth methods let nothing read it at first
(`GrowthContext.unlike`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from growlab.base.pieces import OneByOne
from growlab.widths import WidthGraph, grid

# Least length of the direction of a normalised weight.
_SHORTEST = 1e-6


def kept(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of a full-width network's constants, on the CPU."""
    present = (name for name in graph.constants if name in tensors and not tensors[name].is_meta)
    return {name: tensors[name].detach().cpu().clone() for name in present}


def unchanged(
    graph: WidthGraph, constants: Mapping[str, Tensor], tensors: Mapping[str, Tensor], widths: Mapping[str, int]
) -> dict[str, Tensor]:
    """Return the constants that are what they were: one that something has written to grows as anything else does."""
    known = graph.constants.keys() & constants.keys() & tensors.keys()
    return {
        name: constants[name]
        for name in constants
        if name in known and torch.equal(tensors[name], at_widths(graph, name, constants[name], widths, tensors[name]))
    }


def at_widths(graph: WidthGraph, name: str, constant: Tensor, widths: Mapping[str, int], like: Tensor) -> Tensor:
    """Return a constant at these widths, on the device of `like`, which also has the entries beyond full width."""
    places = [axis.kept(graph.full_widths, widths) for axis in graph.axes[name]]
    result = like.detach().clone()
    known = constant[grid([(place >= 0).nonzero().flatten() for place in places], constant.device)]
    result[grid([place[place >= 0] for place in places], result.device)] = known.to(result)
    return result


def as_applied(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors as the forward applies them, which a growth method scales and draws.

    Offsets are added. In the place of the direction v of a weight normalisation w = g v / |v| is the weight w, in that
    of the length g the factor |v| / g by which v is longer than w: whatever becomes of it, the function does not depend
    on it.

    Tensors that are applied as they are stay the same objects; the others become float64, from which `as_stored` gets
    them back.
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

    Rows of zeros in a normalised weight have the length 0 and a random direction, the same each time.
    """

    def stored(name: str) -> Tensor:
        if name in graph.offsets:
            return _precise(tensors[name]) - graph.offsets[name]
        weight, ratio, dim = _normalised(graph, tensors, name)
        length = torch.norm_except_dim(weight, 2, dim)
        if name in graph.lengths:
            return torch.where(ratio < 0, -length, length)
        drawn = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
        # The square of |v| must not vanish in training's precision.
        ratio = torch.where((length * ratio).abs() < _SHORTEST, 1.0 / length, ratio)
        return torch.where(length == 0, drawn, weight * ratio)

    return _converted(graph, tensors, stored)


def _normalised(graph: WidthGraph, tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor, int]:
    """Both tensors of a weight normalisation, and its dimension, by the name of either."""
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

    No gradient reaches such a row, so entries that an event drew there would stay in the network as noise. A row that
    is not zero (it is trained if the table is tied to an output layer) is left unchanged.
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
