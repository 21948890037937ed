"""Regions: which elements of a weight came with which growth stage (Yuan et al. 2023, Sec. 3.1, Eq. 5).

Element (i, j, ...) of a weight belongs to stage max(birth of output channel i, birth of input channel j).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from growlab.widths import WidthGraph


@dataclass(frozen=True)
class Regions:
    """Regions of one weight [O, I, ...].

    Attributes:
        stages: the stages that occur, ascending, as a tensor [K].
        index_OI: which of them each (output, input) channel pair belongs to, int64 [O, I].
    """

    stages: Tensor
    index_OI: Tensor

    @property
    def num_regions(self) -> int:
        """K."""
        return len(self.stages)

    def norms(self, weight: Tensor) -> Tensor:
        """Frobenius norm of each region of a tensor shaped like the weight: [K]."""
        squares_OI = weight.detach().square()
        if squares_OI.dim() > 2:
            squares_OI = squares_OI.flatten(2).sum(2)
        sums_K = squares_OI.new_zeros(self.num_regions)
        sums_K.index_add_(0, self.index_OI.flatten(), squares_OI.flatten())
        return sums_K.sqrt_()

    def spread(self, values_K: Tensor, dim: int) -> Tensor:
        """Give every element its region's value, in a shape that broadcasts with a weight of `dim` dimensions."""
        values_OI = values_K[self.index_OI]
        return values_OI.view(*values_OI.shape, *[1] * (dim - 2))

    def to(self, device: torch.device) -> "Regions":
        """The same regions on another device."""
        return Regions(self.stages.to(device), self.index_OI.to(device))


def weight_regions(graph: WidthGraph, births: Mapping[str, Sequence[int]]) -> dict[str, Regions]:
    """Regions of every layer's weight.

    Args:
        graph: width graph of the network.
        births: for each group, the stage that each of its channels came with.

    Returns:
        Regions by the weight's name. Fixed channels count as born at stage 0.
    """
    widths = {group: len(stages) for group, stages in births.items()}
    births_by_group = {group: torch.tensor(list(stages)) for group, stages in births.items()}
    regions = {}
    for layer in graph.layers:
        axes = graph.axes[layer.weight]
        rows, columns = (axis.spread(births_by_group, widths, fixed=0).long() for axis in axes[:2])
        stages, index = torch.unique(torch.maximum(rows[:, None], columns[None, :]), return_inverse=True)
        regions[layer.weight] = Regions(stages, index)
    return regions
