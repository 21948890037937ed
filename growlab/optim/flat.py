"""Regions of many weights as segments of one flat tensor, for steps whose number of kernels is independent of theirs.

The elements of the weights, in memory order, follow one another. Sums over all regions are two segmented reductions,
deterministic ones, and one gather spreads a value per region over the elements.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from growlab.optim.regions import Regions

# Longer segments are cut: on a GPU a single block of threads sums a segment.
_LONGEST = 4096


class Flat:
    """Flat tensors of the elements of weights on one device, and of their regions; reads only shapes and strides."""

    def __init__(self, params: Sequence[Tensor], regions: Sequence[Regions]) -> None:
        self._key = [layout_key(p) for p in params]
        self._shape = len(params), max(own.num_regions for own in regions)
        self._strides = [torch.empty_like(p, device="meta").stride() for p in params]
        self._orders = [sorted(range(len(s)), key=s.__getitem__, reverse=True) for s in self._strides]
        self._sizes = [p.numel() for p in params]
        indices, segments, lengths = [], [], []
        for i, (param, own) in enumerate(zip(params, regions, strict=True)):
            index = torch.arange(own.num_regions, device=param.device) + i * self._shape[1]
            index = own.spread(index, param.dim()).expand(param.shape).permute(self._orders[i]).flatten()
            indices.append(index.int())
            num_cuts = 1 + index.numel() // _LONGEST
            cut = torch.arange(index.numel(), device=param.device) // _LONGEST
            found, counts = torch.unique_consecutive(index * num_cuts + cut, return_counts=True)
            segments.append(found // num_cuts)
            lengths.append(counts)
        self._index = torch.cat(indices)
        region_of = torch.cat(segments)
        self._ends = _ends(torch.cat(lengths))
        self._by_region = region_of.argsort(stable=True)
        self._region_ends = _ends(torch.bincount(region_of, minlength=self._shape[0] * self._shape[1]))

    def matches(self, params: Sequence[Tensor]) -> bool:
        """Return True if these have the shapes, strides and devices of the parameters."""
        return self._key == [layout_key(p) for p in params]

    def square_sums(self, params: Sequence[Tensor]) -> Tensor:
        """Sums of squares of the regions, [P, K], padded with 0, in at least float32: squares overflow in float16."""
        flat = torch.cat([_flat(p.detach(), order) for p, order in zip(params, self._orders, strict=True)])
        squares = flat.to(torch.promote_types(flat.dtype, torch.float32)).square_()
        sums = torch.segment_reduce(squares, "sum", offsets=self._ends, unsafe=True)
        sums = sums.index_select(0, self._by_region)
        return torch.segment_reduce(sums, "sum", offsets=self._region_ends, unsafe=True).view(self._shape)

    def spread(self, values_PK: Tensor) -> list[Tensor]:
        """Spread a value per region over the elements: a tensor of the shape and strides of each parameter."""
        pieces = values_PK.flatten().index_select(0, self._index).split(self._sizes)
        return [
            piece.as_strided(key[0], strides)
            for piece, key, strides in zip(pieces, self._key, self._strides, strict=True)
        ]


def layout_key(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.device]:
    """Key of a partition: the tensor's shape, strides and device."""
    return tensor.shape, tensor.stride(), tensor.device


def _flat(tensor: Tensor, order: list[int]) -> Tensor:
    return tensor.flatten() if tensor.is_contiguous() else tensor.permute(order).flatten()


def _ends(lengths: Tensor) -> Tensor:
    """Offsets of segments of these lengths, with the total at the end."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
