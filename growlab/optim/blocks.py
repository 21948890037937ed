"""Pieces of weights that one vector of rates fits, and batches of them that fit in cache.

On a CPU an optimizer's step is bound by memory: the arithmetic is done piece by piece while a piece is in cache,
and the norm that the next step needs is taken from it before it leaves. Rows of a weight that came with the same
stage are contiguous, and all of them take the same rates along the columns: such a run of rows, as a matrix, is a
piece, and its rates are one row vector. Elsewhere (GPUs, weights laid out in other ways) a piece is a whole
weight, its rates a matrix that broadcasts, which costs the fewest operations.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from growlab.optim.regions import Regions

# Elements in a piece and in a batch of pieces. Measured on ResNet-18 (11.2 M parameters): 2^17 to 2^18 are best,
# 2^15 is slower by operation overhead and 2^20 by leaving the cache.
BLOCK_ELEMENTS = 2**18
# With more runs of rows than this (a fused qkv projection of many heads), operation overhead outweighs the cache.
_MAX_RUNS = 64


class Pieces:
    """How one tensor, its gradient and its state are cut.

    Args:
        tensor: the parameter; only shape, strides and device are read, so nothing here goes stale while they hold.
        regions: its regions.
        whole: do not cut it.
    """

    def __init__(self, tensor: Tensor, regions: Regions, whole: bool = False) -> None:
        self.key = _key(tensor)
        self.regions, self.dim = regions, tensor.dim()
        rows = regions.rows_O.tolist()
        num_columns = tensor.numel() // len(rows)
        starts = [i for i, birth in enumerate(rows) if i == 0 or birth != rows[i - 1]]
        self.channels_last = not tensor.is_contiguous()
        fits = tensor.is_contiguous() or (
            tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
        )
        self.whole = whole or tensor.device.type != "cpu" or not fits or len(starts) > _MAX_RUNS
        self.sizes: list[int] = []
        if self.whole:
            self.elements = [tensor.numel()]
            return
        first_rows: list[int] = []
        longest = max(1, BLOCK_ELEMENTS // num_columns)
        for start, end in zip(starts, [*starts[1:], len(rows)], strict=True):
            for row in range(start, end, longest):
                first_rows.append(row)
                self.sizes.append(min(longest, end - row))
        self.elements = [size * num_columns for size in self.sizes]
        index_RI = regions.index_OI[first_rows]
        inner = num_columns // len(regions.columns_I)
        columns = torch.arange(len(regions.columns_I))
        columns = columns.repeat(inner) if self.channels_last else columns.repeat_interleave(inner)
        self.index_RC = index_RI[:, columns].contiguous()
        births, column_of = torch.unique(regions.columns_I, return_inverse=True)
        one_hot = torch.nn.functional.one_hot
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        self._columns = one_hot(column_of[columns], len(births)).to(dtype)
        births_RC = torch.maximum(regions.rows_O[first_rows][:, None], births[None, :])
        both = torch.searchsorted(regions.stages, births_RC.flatten())
        self._both = one_hot(both, regions.num_regions).to(dtype)
        self.column_sums = torch.zeros(len(self.sizes), num_columns, dtype=dtype)
        self.sum_rows = self.column_sums.unbind(0)

    def matches(self, tensor: Tensor) -> bool:
        """Whether the cut still fits the tensor's shape, layout and device."""
        return self.key == _key(tensor)

    def cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Views of a tensor that lies as the parameter does, one a piece."""
        if self.whole:
            return (tensor,)
        if self.channels_last:
            tensor = tensor.permute(0, 2, 3, 1)
        return tensor.reshape(len(self.regions.rows_O), -1).split(self.sizes)

    def aligned(self, tensor: Tensor) -> Tensor:
        """The tensor itself if it lies as the parameter does, else a copy that does."""
        if self.whole or tensor.stride() == self.key[1]:
            return tensor
        return tensor.contiguous(
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format
        )

    def rates(self, values_K: Tensor) -> Sequence[Tensor]:
        """For each piece, its region's value for every element, in a shape that broadcasts."""
        if self.whole:
            return (self.regions.spread(values_K, self.dim),)
        return values_K[self.index_RC].unbind(0)

    def take_sums(self) -> Tensor:
        """Sum of each region, [K], once `sum_rows` holds the sums over the rows of each piece."""
        return (self.column_sums @ self._columns).flatten() @ self._both

    def square_sums(self, tensor: Tensor) -> Tensor:
        """Sum of squares of each region of the tensor: [K]."""
        if self.whole:
            return self.regions.sums(tensor.detach().square())
        for piece, row in zip(self.cut(tensor.detach()), self.sum_rows, strict=True):
            add_squares([piece], [row])
        return self.take_sums()


def add_squares(pieces: list[Tensor], rows: Sequence[Tensor]) -> None:
    """Write the sums of squares over the rows of each piece [R, C] to its row [C]."""
    # `vector_norm(dim=0)` would be one operation, and slower than these two.
    for squares, row in zip(torch._foreach_mul(pieces, pieces), rows, strict=True):
        torch.sum(squares, 0, dtype=row.dtype, out=row)


def batches(elements: Sequence[int]) -> Iterator[slice]:
    """Cut a list of pieces into runs of about `BLOCK_ELEMENTS` elements."""
    start = total = 0
    for i, number in enumerate(elements):
        if total and total + number > BLOCK_ELEMENTS:
            yield slice(start, i)
            start, total = i, 0
        total += number
    if total:
        yield slice(start, len(elements))


def _key(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.device]:
    return tensor.shape, tensor.stride(), tensor.device
