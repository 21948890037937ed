"""Parameters stored with an offset, such as w in Gemma's RMSNorm, which multiplies channels by 1 + w."""

from collections.abc import Mapping

import torch
from torch import Tensor

from growlab.widths import WidthGraph


def as_applied(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as the forward applies them, offset included, which a growth method scales and draws.

    Args:
        graph: the network's width graph.
        tensors: stored tensors by name; those without an offset stay the same objects, the others become float64, in
            which the offset can be removed again exactly.
    """
    return _moved(graph, tensors, 1)


def as_kept(graph: WidthGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as the network stores them: the inverse of `as_applied`, in float64."""
    return _moved(graph, tensors, -1)


def _moved(graph: WidthGraph, tensors: Mapping[str, Tensor], sign: int) -> dict[str, Tensor]:
    moved = dict(tensors)
    for name in graph.offsets.keys() & tensors.keys():
        precise = torch.float32 if tensors[name].device.type == "mps" else torch.float64
        moved[name] = tensors[name].to(precise) + sign * graph.offsets[name]
    return moved
