"""Parameters that a network keeps less a constant: it multiplies channels by 1 + w (Gemma's RMSNorm), not by w."""

from collections.abc import Mapping

import torch
from torch import Tensor

from growlab.widths import WidthGraph


def as_applied(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by name as the forward applies them: what a growth method scales and draws.

    Args:
        graph: the network's width graph.
        tensors: as the network keeps them; those without a constant stay the same objects, the others become float64,
            in which a constant comes off again without a trace.
    """
    return _moved(graph, tensors, 1)


def as_kept(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `as_applied`, in float64."""
    return _moved(graph, tensors, -1)


def _moved(graph: WidthGraph, tensors: Mapping[str, Tensor], sign: int) -> dict[str, Tensor]:
    moved = dict(tensors)
    for name in graph.offsets.keys() & tensors.keys():
        precise = torch.float32 if tensors[name].device.type == "mps" else torch.float64
        moved[name] = tensors[name].to(precise) + sign * graph.offsets[name]
    return moved
