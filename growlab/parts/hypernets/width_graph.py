"""The width graph of a network whose weights a hypernetwork emits, from that of the plain network."""

from collections.abc import Mapping
from dataclasses import replace
from math import prod

import torch
from torch import nn
from torch.nn.utils import parametrize

from growlab.errors import UserError
from growlab.parts.hypernets.modules import Chunks, Embedding, Emitted
from growlab.widths import Axis, Group, Layer, Part, WidthGraph


def emitted_graph(network: nn.Module, graph: WidthGraph, channels: int = 1) -> WidthGraph:
    """How the tensors that emit a network's weights depend on its widths.

    H of a weight [O, I, ...] is [O, I, ..., K]: its first two dimensions carry the channels, the last behaves like one
    of the kernel. What chunks own are arrays over chunks [A, B, ...], rows and columns of the weight in blocks of
    `channels`; widths are then counted in such blocks, so that every width is a whole number of chunks.

    Args:
        network: parametrised by `parametrise`.
        graph: of the network before that.
        channels: channels of a chunk, and therefore of a unit of width; 1 without chunks.

    Raises:
        UserError: a width or a growing weight is not a whole number of chunks.
    """
    for group in graph.groups.values():
        if group.full_width % channels or group.below % channels:
            raise UserError(
                f"the {group.full_width} channels of {group.name} do not split into chunks of {channels}; choose "
                "another growth.chunk_channels."
            )
    units = {
        name: Group(name, group.full_width // channels, group.below // channels)
        for name, group in graph.groups.items()
    }
    modules = dict(network.named_modules())
    axes: dict[str, tuple[Axis, ...]] = {}
    chosen: dict[str, Layer] = {}
    for name, plain in graph.axes.items():
        owner, _, attribute = name.rpartition(".")
        module = modules.get(owner)
        if module is None or not parametrize.is_parametrized(module, attribute):
            axes[name] = tuple(_in_units(axis, channels) for axis in plain)
            continue
        parts = module.get_submodule(f"parametrizations.{attribute}")
        by, place = parts[0], f"{owner}.parametrizations.{attribute}"
        layer = next(layer for layer in graph.layers if layer.weight == name)
        if isinstance(by, Emitted):
            features = by.output.weight.shape[-1]
            axes[f"{place}.original"] = plain
            axes[f"{place}.0.output.weight"] = (*plain, _fixed(features))
            chosen[name] = replace(
                layer,
                weight=f"{place}.0.output.weight",
                offset=f"{place}.original",
                inputs_per_entry=1 / features,
                outputs_per_entry=1 / features,
                variance_per_entry=1 / (features * embedding_variance(by.features.embedding)),
            )
        elif isinstance(by, Chunks):
            rows, columns = (_in_units(axis, channels) for axis in plain[:2])
            # The blocked dimension has one place for each chunk.
            blocked = (
                [_blocks(rows, channels), columns] if not by.by_inputs else [rows, _blocks(columns, channels)]
            )
            own: Mapping[str, torch.Tensor] = {
                "embedding.values": by.embedding.values,
                "weight": by.weight,
                "bias": by.bias,
            }
            axes[f"{place}.original"] = tuple(blocked)
            for part, tensor in own.items():
                axes[f"{place}.0.{part}"] = (*blocked, *(_fixed(size) for size in tensor.shape[2:]))
            kernel = prod(by.kernel)
            chosen[name] = replace(
                layer,
                weight=f"{place}.original",
                emitters=tuple(f"{place}.0.{part}" for part in own),
                inputs_per_entry=kernel * (channels if by.by_inputs else 1),
                outputs_per_entry=kernel * (1 if by.by_inputs or layer.depthwise else channels),
            )
        else:
            raise UserError(
                f"{name} is parametrised by something that growlab does not know; growth cannot widen it."
            )
    layers = tuple(chosen.get(layer.weight, layer) for layer in graph.layers)
    return replace(
        graph,
        groups=units,
        axes=axes,
        layers=layers,
        written={place: _in_units(axis, channels) for place, axis in graph.written.items()},
        channel_norms=tuple(
            replace(norm, axis=_in_units(norm.axis, channels)) for norm in graph.channel_norms
        ),
        attentions=tuple(
            replace(
                attention,
                axis=_in_units(attention.axis, channels),
                queries=tuple(part for name in attention.queries for part in _linear(name, chosen.get(name))),
            )
            for attention in graph.attentions
        ),
    )


def _linear(name: str, layer: Layer | None) -> list[str]:
    """The tensors that multiply what a tensor becomes when all of them are multiplied."""
    return [name] if layer is None else [n for n in (layer.weight, layer.offset) if n is not None]


def embedding_variance(embedding: Embedding) -> float:
    """Var(e) as embeddings are drawn, noise included."""
    return 1.0 + embedding.noise**2 / 3


def _fixed(size: int) -> Axis:
    return Axis((Part(None, size),), "fixed")


def _in_units(axis: Axis, channels: int) -> Axis:
    """The same positions, with widths counted in blocks of channels."""
    parts = [
        part if part.group is None else replace(part, inner=part.inner * channels) for part in axis.parts
    ]
    return Axis(tuple(parts), axis.role)


def _blocks(axis: Axis, channels: int) -> Axis:
    """One position for each block of channels of an axis whose widths are counted in blocks."""
    parts = []
    for part in axis.parts:
        if part.group is not None:
            parts.append(replace(part, inner=part.inner // channels))
        elif part.outer % channels:
            raise UserError(f"{part.outer} fixed channels do not split into chunks of {channels}.")
        else:
            parts.append(Part(None, part.outer // channels))
    return Axis(tuple(parts), axis.role)
