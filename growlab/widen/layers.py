"""Layers inserted into a trained network that start as the identity: their branches add zeros to the stream."""

import re
from collections.abc import Collection, Sequence

from torch import nn

from growlab.widen.sizes import sources
from growlab.widths import WidthGraph


class Deeper:
    """Map the layers of a deeper network to those of a shallower one, and find the tensors that start as zeros.

    Each old layer is followed by its new ones, copies of it in which the tensors that write to the residual stream are
    zero. `new` has the paths of the new layers.
    """

    def __init__(self, network: nn.Module, old: nn.Module) -> None:
        self._origin, self.new = _origins(network, old)

    def source(self, name: str) -> str:
        """Return the name of the tensor in the shallower network that a tensor corresponds to or copies."""
        for match in re.finditer(r"\.\d+(?=\.)", name):
            path = name[: match.end()]
            if path in self._origin:
                return self._origin[path] + name[match.end() :]
        return name

    def zeros(self, graph: WidthGraph, writing: Collection[str]) -> set[str]:
        """Return the names of the new layers' tensors that start as zeros.

        `writing` has the paths of normalisations whose outputs are added to a residual stream.
        """
        streams = _streams(graph, self.new)
        return {name for name in graph.axes if _inside(name, self.new) and _writes(graph, name, streams, writing)}


def _origins(network: nn.Module, old: nn.Module) -> tuple[dict[str, str], list[str]]:
    """Return the old layer that each layer of the deeper network is or copies; and the paths of the new ones."""
    origin, new = {}, []
    before = {path: module for path, module in old.named_modules() if isinstance(module, nn.ModuleList)}
    for path, layers in network.named_modules():
        if not isinstance(layers, nn.ModuleList) or len(layers) <= len(before.get(path, layers)):
            continue
        places = sources(len(before[path]), len(layers))
        for place, source in enumerate(places):
            origin[f"{path}.{place}"] = f"{path}.{source}"
            if place and places[place - 1] == source:
                new.append(f"{path}.{place}")
    return origin, new


def _inside(name: str, paths: Sequence[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)


def _streams(graph: WidthGraph, new: list[str]) -> set[str]:
    """Return the groups whose channels are written both inside of new layers and outside of them."""

    def groups(inside: bool) -> set[str]:
        return {
            group
            for name, axes in graph.axes.items()
            if _inside(name, new) == inside
            for axis in axes
            if axis.role == "out"
            for group in axis.groups
        }

    return groups(True) & groups(False)


def _writes(graph: WidthGraph, name: str, streams: set[str], writing: Collection[str]) -> bool:
    """Return True if a tensor writes to a stream.

    Normalisations before a branch do not; after a branch of zeros only their bias does.
    """
    path, _, own = name.rpartition(".")
    if any(norm.name == path for norm in graph.channel_norms):
        return path in writing and own.endswith("bias")
    return any(axis.role == "out" and streams & set(axis.groups) for axis in graph.axes[name])
