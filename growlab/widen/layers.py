"""Layers that come into a trained network and begin as nothing: their branches write zeros to the stream."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from growlab.errors import UserError
from growlab.widen.sizes import sources
from growlab.widths import WidthGraph


def deeper(graph: WidthGraph, network: nn.Module, old: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of a deeper network that computes what a shallower one of the same class computes.

    Each old layer is followed by the new ones, which are copies of it but for what writes to the stream: that is zero.

    Args:
        graph: layouts of the deeper network.
        network: the deeper network.
        old: the shallower one.

    Returns:
        Tensors by name, and the paths of the new layers.

    Raises:
        UserError: there is no sequence of layers that is longer.
    """
    origin, new = _origins(network, old)
    if not new:
        raise UserError(
            f"{type(network).__name__} keeps its layers in no list that --depth could make longer."
        )
    known, tensors = _named(old), {}
    for name, tensor in _named(network).items():
        source = known.get(_renamed(name, origin))
        if source is not None and source.shape != tensor.shape:
            raise UserError(f"{name} is {list(tensor.shape)} in a deeper network, not {list(source.shape)}.")
        tensors[name] = tensor.clone() if source is None else source.clone()
    streams = _streams(graph, new)
    for name, axes in graph.axes.items():
        if any(name.startswith(f"{path}.") for path in new) and _writes(graph, name, streams):
            assert axes
            tensors[name] = torch.zeros_like(tensors[name])
    return tensors, new


def _named(network: nn.Module) -> dict[str, Tensor]:
    return {**dict(network.named_parameters()), **dict(network.named_buffers())}


def _origins(network: nn.Module, old: nn.Module) -> tuple[dict[str, str], list[str]]:
    """For each layer of the deeper network the path of the old one that it is or copies; paths of the new ones."""
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


def _renamed(name: str, origin: Mapping[str, str]) -> str:
    for match in re.finditer(r"\.\d+(?=\.)", name):
        path = name[: match.end()]
        if path in origin:
            return origin[path] + name[match.end() :]
    return name


def _streams(graph: WidthGraph, new: list[str]) -> set[str]:
    """Groups whose channels are written inside of new layers and outside of them."""

    def groups(inside: bool) -> set[str]:
        return {
            group
            for name, axes in graph.axes.items()
            if any(name.startswith(f"{path}.") for path in new) == inside
            for axis in axes
            if axis.role == "out"
            for group in axis.groups
        }

    return groups(True) & groups(False)


def _writes(graph: WidthGraph, name: str, streams: set[str]) -> bool:
    """Whether a tensor writes to a stream; gains and biases of normalisations before a branch do not."""
    path = name.rpartition(".")[0]
    if any(norm.name == path for norm in graph.channel_norms):
        return False
    return any(axis.role == "out" and streams & set(axis.groups) for axis in graph.axes[name])
