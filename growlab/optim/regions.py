"""Regions: which elements of a tensor came with which growth stage (Yuan et al. 2023, Sec. 3.1, Eq. 5).

Element (i, j, ...) of a tensor belongs to stage max(birth of channel i of the first axis, of channel j of the second,
...). A vector (a bias, a norm's weight) is treated as the single row of a matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
        column_shape: how many dimensions behind the first the columns run over, and their lengths; None: one, [I].
        rated: the regions have rates of their own. Those of vectors never have: they keep the base rate.
    """

    rows_O: Tensor
    columns_I: Tensor
    column_shape: tuple[int, ...] | None = None
    rated: bool = True

    @cached_property
    def stages(self) -> Tensor:
        """The stages that occur, ascending: [K]."""
        return torch.unique(torch.maximum(self.rows_O.unique()[:, None], self.columns_I.unique()[None, :]))

    @cached_property
    def index_OI(self) -> Tensor:
        """Which of the stages each (row, column) belongs to: int64 [O, I]."""
        return self.index_of(self.rows_O)

    def index_of(self, births_R: Tensor) -> Tensor:
        """Which of the stages each column of rows with these births belongs to: int64 [R, I]."""
        births_RI = torch.maximum(births_R[:, None], self.columns_I[None, :])
        return torch.searchsorted(self.stages, births_RI)

    @property
    def num_regions(self) -> int:
        """K."""
        return len(self.stages)

    @cached_property
    def counts(self) -> Tensor:
        """Pairs of a row and a column in each region: int64 [K]."""
        births, rows_of_kind = torch.unique(self.rows_O, return_counts=True)
        found = zip(self.index_of(births), rows_of_kind, strict=True)
        return torch.stack(
            [n * torch.bincount(index_I, minlength=self.num_regions) for index_I, n in found]
        ).sum(0)

    def has_rates(self, tensor: Tensor) -> bool:
        """Whether the regions of a tensor take rates of their own."""
        return self.rated and tensor.dim() > 1

    @property
    def num_column_axes(self) -> int:
        """How many dimensions the columns run over."""
        return 1 if self.column_shape is None else len(self.column_shape)

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
        rows, columns = len(self.rows_O), self.column_shape or (len(self.columns_I),)
        shape = tuple(tensor.shape)
        return (shape == columns and rows == 1) or shape[: 1 + len(columns)] == (rows, *columns)

    def sums(self, tensor: Tensor) -> Tensor:
        """Sum of each region of a tensor [O, I, ...] or [I]: [K], in at least float32.

        Products with one-hot matrices: no atomic additions, so a GPU gives the same sums each time.
        """
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        beside = 1 + self.num_column_axes
        tensor_OI = (
            tensor.flatten(beside).sum(beside, dtype=dtype) if tensor.dim() > beside else tensor.to(dtype)
        )
        rows, columns, both = (table.to(tensor_OI) for table in self._sorting_tables)
        return (rows @ tensor_OI.reshape(len(self.rows_O), -1) @ columns).flatten() @ both

    def norms(self, tensor: Tensor) -> Tensor:
        """Frobenius norm of each region of a tensor: [K]."""
        return self.square_sums(tensor).sqrt_()

    def square_sums(self, tensor: Tensor) -> Tensor:
        """Sum of squares of each region of a tensor, [K], in at least float32: squares leave float16's range."""
        return self.sums(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).square())

    def spread(self, values_K: Tensor, dim: int) -> Tensor:
        """Give every element its region's value, in a shape that broadcasts with a tensor of `dim` dimensions."""
        values_OI = values_K[self.index_OI]
        if dim == 1:
            return values_OI[0]
        columns = self.column_shape or (len(self.columns_I),)
        return values_OI.view(len(values_OI), *columns, *[1] * (dim - 1 - len(columns)))

    def to(self, device: torch.device) -> "Regions":
        """The same regions on another device."""
        return (
            self
            if self.rows_O.device == device
            else replace(self, rows_O=self.rows_O.to(device), columns_I=self.columns_I.to(device))
        )


def weight_regions(
    graph: WidthGraph, births: Mapping[str, Sequence[int]], since: Mapping[str, int] | None = None
) -> dict[str, Regions]:
    """Regions of every layer's weight, every vector and every other tensor with growing channels.

    Those of layers' weights take rates of their own. Vectors, embeddings, tables and other bare parameters keep the
    base rate; their regions have ages (`Adam`) and normalisers (`AvaGrad`).

    Args:
        graph: width graph of the network.
        births: for each group, the stage that each of its channels came with.
        since: the stage that a tensor itself came with, by name; left out: 0. Nothing of it is older.

    Returns:
        Regions by the tensor's name: of parameters and of buffers such as norm statistics. Fixed channels count as
        born at stage 0.
    """
    widths = {group: len(stages) for group, stages in births.items()}
    births_by_group = {group: torch.tensor(list(stages)) for group, stages in births.items()}
    weights = {layer.weight for layer in graph.layers} | graph.emitters
    regions = {}
    for name, axes in graph.axes.items():
        if name in weights or len(axes) == 1 or graph.grows(name):
            stage = (since or {}).get(name, 0)
            # Behind the last axis that grows, and behind the second, all is of one age.
            last = max((dim for dim, axis in enumerate(axes) if axis.groups), default=0)
            stages = [
                axis.spread(births_by_group, widths, fixed=0).long().clamp(min=stage)
                for axis in axes[: max(2, last + 1)]
            ]
            rows, *columns = stages if len(axes) > 1 else [torch.full((1,), stage), *stages]
            regions[name] = Regions(
                rows, _greatest(columns), tuple(map(len, columns)), rated=name in weights and len(axes) > 1
            )
    return regions


def _greatest(births: Sequence[Tensor]) -> Tensor:
    """The latest birth for each combination of channels of several axes, flattened."""
    greatest, *others = births
    for other in others:
        greatest = torch.maximum(greatest[:, None], other[None, :]).flatten()
    return greatest


def _one_hot(index: Tensor, num_classes: int) -> Tensor:
    return torch.nn.functional.one_hot(index, num_classes).float()
