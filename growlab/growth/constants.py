"""Tensors that are no plain weights: constants, parameters stored with an offset, and padding rows.

Constants of growing channels (`WidthGraph.constants`) end training as they began it.

A table of positions [T, C] in a buffer or in a plain attribute of a module, a frozen embedding, the statistics of a
frozen normalisation: at C' channels the network has the first C' columns, and those of channels that arrive come back
as they were. So no new channel can equal an old one, or a twin: growth methods let nothing read it at first
(`GrowthContext.unlike`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from growlab.base.pieces import OneByOne
from growlab.widths import WidthGraph, grid


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


def with_offset(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors as the forward applies them, offset included, which a growth method scales and draws.

    Those with an offset become float64, in which it can be removed again exactly; others stay the same objects.
    """
    return _moved(graph, tensors, 1)


def without_offset(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return tensors as the network stores them: the inverse of `with_offset`, in float64."""
    return _moved(graph, tensors, -1)


def _moved(graph: WidthGraph, tensors: Mapping[str, Tensor], sign: int) -> Mapping[str, Tensor]:
    moved = dict[str, Tensor]()
    for name in graph.offsets.keys() & tensors.keys():
        precise = torch.float32 if tensors[name].device.type == "mps" else torch.float64
        moved[name] = tensors[name].to(precise) + sign * graph.offsets[name]
    if not isinstance(tensors, OneByOne):
        return {**tensors, **moved}
    like = None if tensors.like is None else {**tensors.like, **moved}
    return OneByOne(tensors, lambda name: moved[name] if name in moved else tensors[name], like)


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
