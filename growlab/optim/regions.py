"""Regions of a tensor: its elements by the growth stage that added them (Yuan et al. 2023, Sec. 3.1, Eq. 5).

Element (i, j, ...) of a tensor belongs to stage max(birth of channel i of the first axis, of channel j of the second,
...). A vector (a bias, a norm's weight) is treated as the single row of a matrix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce

import torch
from torch import Tensor

from growlab.base.devices import on_cpu
from growlab.widths import WidthGraph


@dataclass(frozen=True, eq=False)
class Regions:
    """Regions of one tensor [O, I, ...], or [I] with a single row.

    Attributes:
        rows_O: birth stage of each row, int64 [O].
        columns_I: birth stage of each column, int64 [I].
        column_shape: lengths of the dimensions after the first that form the columns; None: one dimension, [I].
        rated: the regions have separate rates; vectors keep the base rate in any case.
    """

    rows_O: Tensor
    columns_I: Tensor
    column_shape: tuple[int, ...] | None = None
    rated: bool = True

    @cached_property
    def stages(self) -> Tensor:
        """Stages that occur, ascending: [K]."""
        return torch.unique(torch.maximum(self.rows_O.unique()[:, None], self.columns_I.unique()[None, :]))

    @cached_property
    def stage_list(self) -> list[int]:
        """Stages that occur, ascending; read from the device once."""
        return self.stages.tolist()

    @cached_property
    def index_OI(self) -> Tensor:
        """Index into `stages` of each (row, column): int64 [O, I]."""
        return self.index_of(self.rows_O)

    def index_of(self, births_R: Tensor) -> Tensor:
        """Index into `stages` of each column, for rows with these birth stages: int64 [R, I]."""
        births_RI = torch.maximum(births_R[:, None], self.columns_I[None, :])
        return torch.searchsorted(self.stages, births_RI)

    @property
    def num_regions(self) -> int:
        """Number of regions, K."""
        return len(self.stages)

    @cached_property
    def counts(self) -> Tensor:
        """Number of (row, column) pairs in each region: int64 [K]."""
        births, num_rows = torch.unique(self.rows_O, return_counts=True)
        pairs = zip(self.index_of(births), num_rows, strict=True)
        return torch.stack([n * torch.bincount(index_I, minlength=self.num_regions) for index_I, n in pairs]).sum(0)

    @cached_property
    def count_list(self) -> list[int]:
        """`counts` as a list; read from the device once."""
        return self.counts.tolist()

    def has_rates(self, tensor: Tensor) -> bool:
        """Return True if the regions of a tensor have separate rates."""
        return self.rated and tensor.dim() > 1

    @property
    def num_column_axes(self) -> int:
        """Number of dimensions that form the columns."""
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
        """Return True if the regions fit the tensor's shape."""
        rows, columns = len(self.rows_O), self.column_shape or (len(self.columns_I),)
        shape = tuple(tensor.shape)
        return (shape == columns and rows == 1) or shape[: 1 + len(columns)] == (rows, *columns)

    def sums(self, tensor: Tensor) -> Tensor:
        """Sum of each region of a tensor [O, I, ...] or [I]: [K], in at least float32.

        Computed by products with one-hot matrices, without atomic additions: deterministic on a GPU.
        """
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        first = 1 + self.num_column_axes
        tensor_OI = tensor.flatten(first).sum(first, dtype=dtype) if tensor.dim() > first else tensor.to(dtype)
        rows, columns, both = (table.to(tensor_OI) for table in self._sorting_tables)
        return (rows @ tensor_OI.reshape(len(self.rows_O), -1) @ columns).flatten() @ both

    def norms(self, tensor: Tensor) -> Tensor:
        """Frobenius norm of each region of a tensor: [K]."""
        return self.square_sums(tensor).sqrt_()

    def square_sums(self, tensor: Tensor) -> Tensor:
        """Sum of squares of each region of a tensor, [K], in at least float32: squares overflow in float16."""
        return self.sums(tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32)).square())

    def spread(self, values_K: Tensor, dim: int) -> Tensor:
        """Spread one value per region over the elements; broadcasts with a tensor of `dim` dimensions."""
        values_OI = values_K[self.index_OI]
        if dim == 1:
            return values_OI[0]
        columns = self.column_shape or (len(self.columns_I),)
        return values_OI.view(len(values_OI), *columns, *[1] * (dim - 1 - len(columns)))

    def to(self, device: torch.device) -> "Regions":
        """Return the regions on a device."""
        if self.rows_O.device == device:
            return self
        return replace(self, rows_O=self.rows_O.to(device), columns_I=self.columns_I.to(device))


@on_cpu
def weight_regions(
    graph: WidthGraph, births: Mapping[str, Sequence[int]], since: Mapping[str, int | Sequence[int]] | None = None
) -> dict[str, Regions]:
    """Build the regions of every layer's weight, every vector and every other tensor with growing channels.

    Regions of layers' weights have separate rates. Vectors, embeddings, tables and other bare parameters keep the base
    rate; their regions have ages (`Adam`) and normalisers (`AvaGrad`).

    Args:
        graph: width graph of the network.
        births: birth stage of each channel, by group.
        since: stage at which a whole tensor, or each of its rows, was added, by name (default 0): the least stage of
            its elements.

    Returns:
        Regions by the tensor's name, of parameters and of buffers such as norm statistics. Fixed channels have stage 0.
    """
    widths = {group: len(stages) for group, stages in births.items()}
    births_by_group = {group: torch.tensor(list(stages)) for group, stages in births.items()}
    weights = ({layer.weight for layer in graph.layers} | graph.emitters) - graph.lengths.keys()
    regions, since = {}, since or {}
    for name, axes in graph.axes.items():
        if name in weights or len(axes) == 1 or graph.grows(name) or name in since:
            # Elements that differ only beyond the last growing axis, and beyond the second, have the same age.
            last = max((dim for dim, axis in enumerate(axes) if axis.groups), default=0)
            stages = [axis.spread(births_by_group, widths, fixed=0).long() for axis in axes[: max(2, last + 1)]]
            stages[0] = torch.maximum(stages[0], torch.as_tensor(since.get(name, 0)))
            rows, *columns = stages if len(axes) > 1 else [torch.zeros(1, dtype=torch.int64), *stages]
            rated = name in weights and len(axes) > 1
            columns_I = reduce(lambda one, other: torch.maximum(one[:, None], other[None, :]).flatten(), columns)
            regions[name] = Regions(rows, columns_I, tuple(map(len, columns)), rated)
    return regions


def _one_hot(index: Tensor, num_classes: int) -> Tensor:
    return torch.nn.functional.one_hot(index, num_classes).float()
