"""Incoming and outgoing weights of channels (rows and columns) in any traced network."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from growlab.widths import Axis, Layer, Norm, WidthGraph, grid


@dataclass(frozen=True)
class TensorDim:
    """One dimension of a tensor that carries a group's channels."""

    name: str
    dim: int


@dataclass(frozen=True)
class GroupTensors:
    """Tensors that produce and consume a group's channels; depthwise layers are only in `depthwise`.

    `incoming` are the producers' weights, then their biases; `outgoing` are the consumers' weights; `norms` are batch
    and instance normalisations of the channels.
    """

    group: str
    producers: tuple[Layer, ...]
    consumers: tuple[Layer, ...]
    incoming: tuple[TensorDim, ...]
    outgoing: tuple[TensorDim, ...]
    depthwise: tuple[Layer, ...]
    norms: tuple[Norm, ...]


def group_tensors(graph: WidthGraph, group: str) -> GroupTensors:
    """Find the tensors that produce and consume a group's channels."""

    def dims(name: str | None, role: str) -> list[int]:
        axes = graph.axes.get(name, ()) if name is not None else ()
        return [dim for dim, axis in enumerate(axes) if axis.role == role and group in axis.groups]

    mixing = [layer for layer in graph.layers if not layer.depthwise]
    producers = tuple(layer for layer in mixing if dims(layer.weight, "out"))
    consumers = tuple(layer for layer in mixing if dims(layer.weight, "in"))
    weights = [TensorDim(layer.weight, dim) for layer in producers for dim in dims(layer.weight, "out")]
    biases = [TensorDim(layer.bias, dim) for layer in producers if layer.bias for dim in dims(layer.bias, "out")]
    out = [TensorDim(layer.weight, dim) for layer in consumers for dim in dims(layer.weight, "in")]
    return GroupTensors(
        group,
        producers,
        consumers,
        tuple(dict.fromkeys([*weights, *biases])),
        tuple(dict.fromkeys(out)),
        tuple(layer for layer in graph.layers if layer.depthwise and dims(layer.weight, "out")),
        tuple(norm for norm in graph.norms if any(dims(name, "out") for name in (norm.weight, norm.running_mean))),
    )


def names_of(groups: Sequence[GroupTensors], *sides: str) -> list[str]:
    """Names of the groups' incoming ("incoming") or outgoing ("outgoing") weights, without duplicates."""
    return list(dict.fromkeys(slot.name for fans in groups for side in sides for slot in getattr(fans, side)))


@dataclass(frozen=True)
class ChannelView:
    """Reads and writes channels' entries of tensors, restricted to their connections with old channels.

    In other dimensions only the first channels, up to the widths `among`, are used.
    """

    graph: WidthGraph
    widths: Mapping[str, int]
    among: Mapping[str, int]

    def old(self, group: str) -> Tensor:
        """Indices of a group's first channels, up to `among`."""
        return torch.arange(self.among[group])

    def new(self, group: str) -> Tensor:
        """Indices of a group's other channels."""
        return torch.arange(self.among[group], self.widths[group])

    def read(self, tensors: Mapping[str, Tensor], slots: Sequence[TensorDim], group: str, channels: Tensor) -> Tensor:
        """Read the entries of channels, [channels, entries of one channel], in the order of the slots."""
        pieces = []
        for slot in slots:
            tensor = tensors[slot.name]
            for dim, position in enumerate(self._positions(slot, group, channels)):
                tensor = tensor.index_select(dim, position.to(tensor.device))
            pieces.append(tensor.movedim(slot.dim, 0).reshape(len(channels), self.size([slot], group)))
        return torch.cat(pieces, 1)

    def write(
        self, tensors: dict[str, Tensor], slots: Sequence[TensorDim], group: str, channels: Tensor, values: Tensor
    ) -> None:
        """Write entries, [channels, entries of one channel] as from `read`, into copies that replace the tensors."""
        start = 0
        for slot in slots:
            positions = self._positions(slot, group, channels)
            sizes = [len(p) for p in positions]
            sizes.insert(0, sizes.pop(slot.dim))
            count = sizes[0] // max(len(channels), 1) * prod(sizes[1:])
            part = values[:, start : start + count].reshape(sizes).movedim(0, slot.dim)
            start += count
            new = tensors[slot.name].clone()
            new[grid(positions, new.device)] = part.to(new)
            tensors[slot.name] = new

    def size(self, slots: Sequence[TensorDim], group: str) -> int:
        """Number of entries of one channel."""

        def length(axis: Axis, of_channel: bool) -> int:
            if not of_channel:
                return axis.length(self.among)
            return sum(part.outer * part.inner for part in axis.parts if part.group == group)

        return sum(
            prod(length(axis, dim == slot.dim) for dim, axis in enumerate(self.graph.axes[slot.name])) for slot in slots
        )

    def _positions(self, slot: TensorDim, group: str, channels: Tensor) -> list[Tensor]:
        return [
            self.places(axis, group)[channels].flatten() if dim == slot.dim else axis.kept(self.among, self.widths)
            for dim, axis in enumerate(self.graph.axes[slot.name])
        ]

    def places(self, axis: Axis, group: str) -> Tensor:
        """Positions of each channel of the group on an axis, [width, positions of one channel]."""
        if len(axis.parts) == 1:
            (part,) = axis.parts
            positions = torch.arange(axis.length(self.widths)).view(part.outer, self.widths[group], part.inner)
            return positions.transpose(0, 1).reshape(self.widths[group], -1)
        marks = {name: torch.full((self.widths[name],), -1) for name in axis.groups}
        marks[group] = torch.arange(self.widths[group])
        spread = axis.spread(marks, self.widths, fixed=-1)
        order = torch.argsort(spread, stable=True)
        return order[int((spread < 0).sum()) :].view(self.widths[group], -1)
