"""Cut weights into pieces that share one vector of rates, and into batches of pieces that fit in cache.

On a CPU an optimizer's step is memory-bound: the arithmetic is done piece by piece while a piece is in cache, and the
norm for the next step is computed before it leaves. Rows of a weight that were added at the same stage are contiguous
and have the same rates along the columns: such a run of rows, as a matrix, is a piece, and its rates are one row
vector. If runs are short, a piece consists of several, its rates are a matrix, and its squares are summed by a product
with a one-hot matrix. Elsewhere (GPUs, other memory layouts) a piece is a whole weight and its rates a matrix that
broadcasts, which takes the fewest operations.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from growlab.optim.regions import Regions

# Elements in a piece and in a batch of pieces. Measured on ResNet-18 (11.2 M parameters): 2^17 to 2^18 are best,
# 2^15 is slower by operation overhead and 2^20 by leaving the cache.
BLOCK_ELEMENTS = 2**18
# Runs shorter than this on average share a piece: one operation over several is faster than several operations.
_SHORT_RUN = 2**16
# With more runs of rows than this (a fused qkv projection of many heads), operation overhead outweighs the cache.
_MAX_RUNS = 64


# Output buffer of sums over rows: a row [C], or a matrix [R, C] and the one-hot matrix [R, rows] of its runs.
SumRows = tuple[Tensor, Tensor | None]


class Pieces:
    """Partition of a tensor, its gradient and its state into pieces.

    Args:
        tensor: the parameter; only its shape, strides and device are read, so the partition is valid while they are the
            same.
        regions: its regions.
        whole: use a single piece.
    """

    def __init__(self, tensor: Tensor, regions: Regions, whole: bool = False) -> None:
        self.key = layout_key(tensor)
        self.regions, self.dim = regions, tensor.dim()
        rows = regions.rows_O.tolist()
        num_columns = tensor.numel() // len(rows)
        starts = [i for i, birth in enumerate(rows) if i == 0 or birth != rows[i - 1]]
        self.channels_last = not tensor.is_contiguous()
        fits = tensor.is_contiguous() or (
            tensor.dim() == 4
            and tensor.is_contiguous(memory_format=torch.channels_last)
            and regions.num_column_axes == 1
        )
        self.whole = whole or tensor.device.type != "cpu" or not fits or len(starts) > _MAX_RUNS
        self.sizes: list[int] = []
        if self.whole:
            self.elements = [tensor.numel()]
            return
        longest = max(1, BLOCK_ELEMENTS // num_columns)
        together = tensor.numel() < _SHORT_RUN * len(starts)
        bounds = [0, len(rows)] if together else [*starts, len(rows)]
        # The rows of `index_RI`: one for each run in each piece.
        first_rows: list[int] = []
        dtype = torch.promote_types(tensor.dtype, torch.float32)
        # For each piece: the rows of `index_RI` for its runs, and the run of each of its rows.
        self._runs: list[tuple[slice, Tensor | None, Tensor | None]] = []
        for start, end in pairwise(bounds):
            for row in range(start, end, longest):
                last = min(end, row + longest)
                own = [row] + [first for first in starts if row < first < last]
                here = slice(len(first_rows), len(first_rows) + len(own))
                first_rows += own
                self.sizes.append(last - row)
                if len(own) == 1:
                    self._runs.append((here, None, None))
                    continue
                run_of = torch.searchsorted(torch.tensor(own), torch.arange(row, last), right=True) - 1
                one_hot = torch.nn.functional.one_hot(run_of, len(own)).T.to(dtype).contiguous()
                self._runs.append((here, run_of, one_hot))
        self.elements = [size * num_columns for size in self.sizes]
        self.index_RI = regions.index_of(regions.rows_O[first_rows])
        self._inner = num_columns // len(regions.columns_I)
        one_hot_of = torch.nn.functional.one_hot
        births, column_of = torch.unique(regions.columns_I, return_inverse=True)
        self._columns = one_hot_of(column_of, len(births)).to(dtype)
        births_RC = torch.maximum(regions.rows_O[first_rows][:, None], births[None, :])
        both = torch.searchsorted(regions.stages, births_RC.flatten())
        self._both = one_hot_of(both, regions.num_regions).to(dtype)
        self.column_sums = torch.zeros(len(first_rows), num_columns, dtype=dtype)
        self.sum_rows: list[SumRows] = [
            (self.column_sums[here] if one_hot is not None else self.column_sums[here.start], one_hot)
            for here, _, one_hot in self._runs
        ]

    def matches(self, tensor: Tensor) -> bool:
        """Return True if the partition fits the tensor's shape, strides and device."""
        return self.key == layout_key(tensor)

    def cut(self, tensor: Tensor) -> Sequence[Tensor]:
        """Cut a tensor with the parameter's strides into views, one per piece."""
        if self.whole:
            return (tensor,)
        if self.channels_last:
            tensor = tensor.permute(0, 2, 3, 1)
        return tensor.reshape(len(self.regions.rows_O), -1).split(self.sizes)

    def rates(self, values_K: Tensor) -> Sequence[Tensor]:
        """Spread one value per region over the elements of each piece, in shapes that broadcast."""
        if self.whole:
            return (self.regions.spread(values_K, self.dim),)
        table = self._spread(values_K[self.index_RI])
        if len(self._runs) == len(table):
            return table.unbind(0)
        return [
            table[here.start] if run_of is None else table[here].index_select(0, run_of)
            for here, run_of, _ in self._runs
        ]

    def take_sums(self) -> Tensor:
        """Sum of each region, [K], from the sums over rows in the `sum_rows` buffers."""
        sums = self.column_sums
        if self._inner > 1:
            rows, columns = self.index_RI.shape
            if self.channels_last:
                sums = sums.view(rows, self._inner, columns).sum(1)
            else:
                sums = sums.view(rows, columns, self._inner).sum(2)
        return (sums @ self._columns).flatten() @ self._both

    def _spread(self, values_RI: Tensor) -> Tensor:
        """Repeat a value for each input channel over the receptive field: [R, C], in the weight's memory order."""
        if self._inner == 1:
            return values_RI
        rows, columns = values_RI.shape
        if self.channels_last:
            return values_RI[:, None, :].expand(rows, self._inner, columns).reshape(rows, -1)
        return values_RI[:, :, None].expand(rows, columns, self._inner).reshape(rows, -1)

    def square_sums(self, tensor: Tensor) -> Tensor:
        """Sum of squares of each region of the tensor: [K]."""
        if self.whole:
            return self.regions.square_sums(tensor)
        for piece, row in zip(self.cut(tensor.detach()), self.sum_rows, strict=True):
            add_squares([piece], [row])
        return self.take_sums()


def aligned(tensor: Tensor, like: Tensor) -> Tensor:
    """Return the tensor itself if it has the strides of `like`, else a copy that has."""
    # Strides of dimensions of size 1 do not matter.
    if tensor.stride() == like.stride() or (tensor.is_contiguous() and like.is_contiguous()):
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)


def add_squares(pieces: Sequence[Tensor], rows: Sequence[SumRows]) -> None:
    """Write the sums of squares over the rows of each run of each piece into its buffer."""
    # `vector_norm(dim=0)` is one operation, but slower than these two.
    for piece, (row, one_hot) in zip(pieces, rows, strict=True):
        piece = piece.to(row.dtype)  # Squares overflow in float16.
        squares = piece * piece
        if one_hot is None:
            torch.sum(squares, 0, dtype=row.dtype, out=row)
        else:
            torch.mm(one_hot, squares, out=row)


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


def layout_key(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.device]:
    """Key of a partition: the tensor's shape, strides and device."""
    return tensor.shape, tensor.stride(), tensor.device


def handed_over(tensor: Tensor, device: torch.device) -> Tensor:
    """Move a tensor to a device without waiting for work that is queued there."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
