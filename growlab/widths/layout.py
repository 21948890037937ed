"""Layouts: the order of width groups' channels along one dimension of a tensor, for any width.

An axis is a concatenation of parts. A growing part repeats the channels of one group: position
`(o * width + c) * inner + i` belongs to channel `c`, for `o < outer` and `i < inner`. A flattened image of C
channels and 4x4 positions is one part with `inner = 16`; a fused qkv projection is three parts. A fixed part
has no group and a size that never changes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Role = Literal["out", "in", "fixed"]


@dataclass(frozen=True)
class Part:
    """A run of positions: `outer x width(group) x inner`, or `outer` fixed positions where group is None."""

    group: str | None
    outer: int = 1
    inner: int = 1

    def length(self, widths: Mapping[str, int]) -> int:
        """Number of positions at the given widths."""
        width = 1 if self.group is None else widths[self.group]
        return self.outer * width * self.inner


@dataclass(frozen=True)
class Axis:
    """One dimension of a parameter or buffer.

    Attributes:
        parts: the concatenation of parts.
        role: "out" where the tensor produces or accompanies the channels (rows of a weight, biases, norm
            parameters), "in" where it consumes them (columns of a weight), "fixed" where nothing grows.
    """

    parts: tuple[Part, ...]
    role: Role

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups with channels on this axis, each once, in order."""
        return tuple(dict.fromkeys(part.group for part in self.parts if part.group is not None))

    def length(self, widths: Mapping[str, int]) -> int:
        """Number of positions at the given widths."""
        return sum(part.length(widths) for part in self.parts)

    def spread(self, values: Mapping[str, Tensor], widths: Mapping[str, int], fixed: float) -> Tensor:
        """Give every position its channel's value: a tensor [length].

        Args:
            values: one value per channel for each group on the axis, [width].
            widths: width of each group.
            fixed: the value at fixed positions.
        """
        pieces = []
        for part in self.parts:
            if part.group is None:
                dtype = next(iter(values.values())).dtype if values else torch.get_default_dtype()
                pieces.append(torch.full((part.length(widths),), fixed, dtype=dtype))
            else:
                pieces.append(values[part.group].repeat_interleave(part.inner).repeat(part.outer))
        return torch.cat(pieces) if pieces else torch.empty(0)

    def lift(self, maps: Mapping[str, Tensor], widths: Mapping[str, int], target_widths: Mapping[str, int]) -> Tensor:
        """Turn maps between channels into the map between positions that they induce.

        Args:
            maps: for each group, the channel at `target_widths` that each channel at `widths` is sent to,
                int64 [width], or -1 for none.
            widths: widths the positions are counted at.
            target_widths: widths the result's positions are counted at.

        Returns:
            int64 [length at widths]: positions at `target_widths`, -1 for none. Fixed positions map to
            themselves.
        """
        match self.parts:
            case (Part(group=str(group), outer=1, inner=1),):
                # One position per channel, as on nearly all axes.
                return maps[group].clone()
        pieces, start = [], 0
        for part in self.parts:
            if part.group is None:
                pieces.append(start + torch.arange(part.length(widths)))
            else:
                channel = maps[part.group]
                outer = torch.arange(part.outer)[:, None, None]
                inner = torch.arange(part.inner)
                position = (outer * target_widths[part.group] + channel[:, None]) * part.inner + inner
                position = torch.where(channel[:, None] < 0, -1, start + position)
                pieces.append(position.flatten())
            start += part.length(target_widths)
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)

    def kept(self, widths: Mapping[str, int], new_widths: Mapping[str, int]) -> Tensor:
        """Map each position to its new one when groups keep their first channels: int64 [length], -1 for dropped."""
        maps = {}
        for group in self.groups:
            channels = torch.arange(widths[group])
            maps[group] = torch.where(channels < new_widths[group], channels, -1)
        return self.lift(maps, widths, new_widths)
