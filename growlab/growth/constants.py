"""Constants that stand beside growing channels (`WidthGraph.constants`): they end training as they began it.

A table of positions [T, C] in a buffer or in a plain attribute of a module, a frozen embedding, the statistics of a
frozen normalisation: at C' channels the network has the first C' columns, and those of channels that arrive come back
as they were. So no new channel can equal an old one, or a twin: growth methods let nothing read it at first
(`Expansion.unlike`).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from growlab.widths import WidthGraph, grid


def kept(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of a full-width network's constants, on the CPU.

    Args:
        graph: its width graph.
        tensors: its parameters, buffers and plain tensors by name.
    """
    present = (name for name in graph.constants if name in tensors and not tensors[name].is_meta)
    return {name: tensors[name].detach().cpu().clone() for name in present}


def unchanged(
    graph: WidthGraph,
    constants: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    widths: Mapping[str, int],
) -> dict[str, Tensor]:
    """Constants that are still what they were: one that something has written to grows as anything else does.

    Args:
        graph: the network's width graph.
        constants: at full width, by name.
        tensors: of the network as it is.
        widths: width of each group in it.
    """
    known = graph.constants.keys() & constants.keys() & tensors.keys()
    return {
        name: constants[name]
        for name in constants
        if name in known
        and torch.equal(tensors[name], at_widths(graph, name, constants[name], widths, tensors[name]))
    }


def at_widths(
    graph: WidthGraph, name: str, constant: Tensor, widths: Mapping[str, int], like: Tensor
) -> Tensor:
    """A constant at these widths, on the device of `like`, which also has the entries beyond full width.

    Args:
        graph: the network's width graph.
        name: of the constant.
        constant: at full width.
        widths: width of each group.
        like: a tensor at these widths.
    """
    places = [axis.kept(graph.full_widths, widths) for axis in graph.axes[name]]
    result = like.detach().clone()
    known = constant[grid([(place >= 0).nonzero().flatten() for place in places], constant.device)]
    result[grid([place[place >= 0] for place in places], result.device)] = known.to(result)
    return result
