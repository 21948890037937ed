"""Regions: which elements of a tensor came with which growth stage (Yuan et al. 2023, Sec. 3.1, Eq. 5).

Element (i, j, ...) of a weight belongs to stage max(birth of output channel i, birth of input channel j). A
vector (a bias, a norm's weight) is treated as the single row of a matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from growlab.widths import WidthGraph


@dataclass(frozen=True, eq=False)
class Regions:
    """Regions of one tensor [O, I, ...], or [I] with a single row.

    Attributes:
        rows_O: birth stage of each row, int64 [O].
        columns_I: birth stage of each column, int64 [I].
    """

    rows_O: Tensor
    columns_I: Tensor

    @cached_property
    def _unique(self) -> tuple[Tensor, Tensor]:
        births_OI = torch.maximum(self.rows_O[:, None], self.columns_I[None, :])
        return torch.unique(births_OI, return_inverse=True)

    @property
    def stages(self) -> Tensor:
        """The stages that occur, ascending: [K]."""
        return self._unique[0]

    @property
    def index_OI(self) -> Tensor:
        """Which of the stages each (row, column) belongs to: int64 [O, I]."""
        return self._unique[1]

    @property
    def num_regions(self) -> int:
        """K."""
        return len(self.stages)

    @cached_property
    def _sorting_tables(self) -> tuple[Tensor, Tensor, Tensor]:
        row_births, row_of = torch.unique(self.rows_O, return_inverse=True)
        column_births, column_of = torch.unique(self.columns_I, return_inverse=True)
        births_RC = torch.maximum(row_births[:, None], column_births[None, :])
        return (
            _one_hot(row_of, len(row_births)).T.contiguous(),
            _one_hot(column_of, len(column_births)),
            _one_hot(torch.searchsorted(self.stages, births_RC.flatten()), self.num_regions),
        )

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has the shape that the regions are about."""
        rows, columns = len(self.rows_O), len(self.columns_I)
        return (tuple(tensor.shape) == (columns,) and rows == 1) or tuple(tensor.shape[:2]) == (rows, columns)

    def sums(self, tensor: Tensor) -> Tensor:
        """Sum of each region of a tensor [O, I, ...] or [I]: [K], in at least float32.

        Products with one-hot matrices: no atomic additions, so a GPU gives the same sums each time.
        """
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        tensor_OI = tensor.flatten(2).sum(2, dtype=dtype) if tensor.dim() > 2 else tensor.to(dtype)
        rows, columns, both = (table.to(tensor_OI) for table in self._sorting_tables)
        return (rows @ tensor_OI.view(len(self.rows_O), -1) @ columns).flatten() @ both

    def norms(self, tensor: Tensor) -> Tensor:
        """Frobenius norm of each region of a tensor: [K]."""
        return self.square_sums(tensor).sqrt_()

    def square_sums(self, tensor: Tensor) -> Tensor:
        """Sum of squares of each region of a tensor, [K], in at least float32: squares leave float16's range."""
        return self.sums(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).square())

    def spread(self, values_K: Tensor, dim: int) -> Tensor:
        """Give every element its region's value, in a shape that broadcasts with a tensor of `dim` dimensions."""
        values_OI = values_K[self.index_OI]
        return values_OI[0] if dim == 1 else values_OI.view(*values_OI.shape, *[1] * (dim - 2))

    def to(self, device: torch.device) -> "Regions":
        """The same regions on another device."""
        return (
            self
            if self.rows_O.device == device
            else Regions(self.rows_O.to(device), self.columns_I.to(device))
        )


def weight_regions(
    graph: WidthGraph, births: Mapping[str, Sequence[int]], since: Mapping[str, int] | None = None
) -> dict[str, Regions]:
    """Regions of every layer's weight and of every vector with growing channels.

    Args:
        graph: width graph of the network.
        births: for each group, the stage that each of its channels came with.
        since: the stage that a tensor itself came with, by name; left out: 0. Nothing of it is older.

    Returns:
        Regions by the tensor's name: layers' weights, and biases, norm parameters and norm statistics.
        Fixed channels count as born at stage 0.
    """
    widths = {group: len(stages) for group, stages in births.items()}
    births_by_group = {group: torch.tensor(list(stages)) for group, stages in births.items()}
    weights = {layer.weight for layer in graph.layers} | graph.emitters
    regions = {}
    for name, axes in graph.axes.items():
        if name in weights or len(axes) == 1:
            stages = [axis.spread(births_by_group, widths, fixed=0).long() for axis in axes[:2]]
            rows, columns = stages if len(stages) == 2 else (torch.zeros(1, dtype=torch.long), stages[0])
            stage = (since or {}).get(name, 0)
            regions[name] = Regions(rows.clamp(min=stage), columns.clamp(min=stage))
    return regions


def _one_hot(index: Tensor, num_classes: int) -> Tensor:
    return torch.nn.functional.one_hot(index, num_classes).float()
