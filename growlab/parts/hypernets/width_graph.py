"""Derive the width graph of a network with emitted weights from that of the plain network."""

from dataclasses import replace
from math import prod

from torch import nn
from torch.nn.utils import parametrize

from growlab.base.errors import UserError
from growlab.parts.hypernets.modules import Chunks, Embedding, Emitted
from growlab.widths import Axis, Group, Layer, Part, WidthGraph


def emitted_graph(network: nn.Module, graph: WidthGraph, channels: int = 1) -> WidthGraph:
    """Return the width graph of the tensors that emit a network's weights.

    H of a weight [O, I, ...] is [O, I, ..., K]: its first two dimensions carry the channels, the last behaves like a
    kernel dimension. Tensors of chunks are arrays over chunks [A, B, ...], rows and columns of the weight in blocks of
    `channels`; widths are then counted in such blocks, so that every width is a whole number of chunks.

    Args:
        network: a network parametrised by `parametrise`.
        graph: its width graph before that.
        channels: channels per chunk, the unit of widths; 1 without chunks.

    Raises:
        UserError: a width or a growing weight is not a whole number of chunks.
    """
    units = {}
    for name, group in graph.groups.items():
        if group.full_width % channels or group.below % channels:
            raise UserError(
                f"the {group.full_width} channels of {group.name} do not split into chunks of {channels}; choose "
                "other chunk_channels."
            )
        units[name] = Group(name, group.full_width // channels, group.below // channels)
    modules = dict(network.named_modules())
    axes: dict[str, tuple[Axis, ...]] = {}
    chosen: dict[str, Layer] = {}
    for name, plain in graph.axes.items():
        owner, _, attribute = name.rpartition(".")
        module = modules.get(owner)
        if module is None or not parametrize.is_parametrized(module, attribute):
            axes[name] = tuple(_in_units(axis, channels) for axis in plain)
            continue
        by = module.get_submodule(f"parametrizations.{attribute}")[0]
        place = f"{owner}.parametrizations.{attribute}"
        layer = next(layer for layer in graph.layers if layer.weight == name)
        if isinstance(by, Emitted):
            own, chosen[name] = _emitted(by, place, plain, layer)
        elif isinstance(by, Chunks):
            own, chosen[name] = _chunked(by, place, plain, layer, channels)
        else:
            raise UserError(
                f"{name} is parametrised by something that growlab does not know; growth cannot widen it."
            )
        axes |= own
    return replace(
        graph,
        groups=units,
        axes=axes,
        layers=tuple(chosen.get(layer.weight, layer) for layer in graph.layers),
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


def _emitted(
    by: Emitted, place: str, plain: tuple[Axis, ...], layer: Layer
) -> tuple[dict[str, tuple[Axis, ...]], Layer]:
    """Return the axes of H and beta, and the layer with them in place of its weight."""
    features, weight = by.output.weight.shape[-1], f"{place}.0.output.weight"
    axes = {f"{place}.original": plain, weight: (*plain, _fixed(features))}
    variance = 1 / (features * embedding_variance(by.features.embedding))
    return axes, replace(
        layer,
        weight=weight,
        offset=f"{place}.original",
        inputs_per_entry=1 / features,
        outputs_per_entry=1 / features,
        variance_per_entry=variance,
    )


def _chunked(
    by: Chunks, place: str, plain: tuple[Axis, ...], layer: Layer, channels: int
) -> tuple[dict[str, tuple[Axis, ...]], Layer]:
    """Return the axes of the tensors of chunks, and the layer with the gains in place of its weight."""
    rows, columns = (_in_units(axis, channels) for axis in plain[:2])
    # The blocked dimension has one place for each chunk.
    blocked = [rows, _blocks(columns, channels)] if by.by_inputs else [_blocks(rows, channels), columns]
    own = {"embedding.values": by.embedding.values, "weight": by.weight, "bias": by.bias}
    axes: dict[str, tuple[Axis, ...]] = {f"{place}.original": tuple(blocked)}
    for part, tensor in own.items():
        axes[f"{place}.0.{part}"] = (*blocked, *(_fixed(size) for size in tensor.shape[2:]))
    kernel = prod(by.kernel)
    return axes, replace(
        layer,
        weight=f"{place}.original",
        emitters=tuple(f"{place}.0.{part}" for part in own),
        inputs_per_entry=kernel * (channels if by.by_inputs else 1),
        outputs_per_entry=kernel * (1 if by.by_inputs or layer.depthwise else channels),
    )


def _linear(name: str, layer: Layer | None) -> list[str]:
    """Names of the tensors that a (possibly emitted) tensor is linear in: scaling all of them scales it."""
    return [name] if layer is None else [n for n in (layer.weight, layer.offset) if n is not None]


def embedding_variance(embedding: Embedding) -> float:
    """Variance of an embedding at initialisation, Var(e), noise included."""
    return 1.0 + embedding.noise**2 / 3


def _fixed(size: int) -> Axis:
    return Axis((Part(None, size),), "fixed")


def _in_units(axis: Axis, channels: int) -> Axis:
    """Express an axis with widths counted in blocks of channels."""
    parts = [
        part if part.group is None else replace(part, inner=part.inner * channels) for part in axis.parts
    ]
    return Axis(tuple(parts), axis.role)


def _blocks(axis: Axis, channels: int) -> Axis:
    """Reduce an axis, with widths counted in blocks of channels, to one position per block."""
    parts = []
    for part in axis.parts:
        if part.group is not None:
            parts.append(replace(part, inner=part.inner // channels))
        elif part.outer % channels:
            raise UserError(f"{part.outer} fixed channels do not split into chunks of {channels}.")
        else:
            parts.append(Part(None, part.outer // channels))
    return Axis(tuple(parts), axis.role)
