"""Grow a network whose weights a hypernetwork emits, by widening the hypernetwork."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from growlab.base.errors import UserError
from growlab.base.settings import one_of
from growlab.growth import GrowthContext, NewWeights, VarianceTransfer
from growlab.growth.method import WeightRule
from growlab.parts.hypernets.initialisations import Emission, Initialisation
from growlab.parts.hypernets.parametrise import Chunks, Emitted, Hypernet, materialize, parametrise
from growlab.widths import Axis, Group, Layer, Part, WidthGraph


def emitted_graph(network: nn.Module, graph: WidthGraph, channels: int = 1) -> WidthGraph:
    """Return the width graph of the tensors that emit a network's weights, given the one before `parametrise`.

    H of a weight [O, I, ...] is [O, I, ..., K]: its first two dimensions carry the channels, the last behaves like a
    kernel dimension. Tensors of chunks are arrays over chunks [A, B, ...], rows and columns of the weight in blocks of
    `channels`. Widths are then counted in blocks, so that every width is a whole number of chunks.

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
    emitted: dict[str, Layer] = {}
    for name, plain in graph.axes.items():
        owner, _, attribute = name.rpartition(".")
        module = modules.get(owner)
        if module is None or not parametrize.is_parametrized(module, attribute):
            axes[name] = tuple(_in_units(axis, channels) for axis in plain)
            continue
        by = module.get_submodule(f"parametrizations.{attribute}")[0]
        prefix = f"{owner}.parametrizations.{attribute}"
        layer = next(layer for layer in graph.layers if layer.weight == name)
        if isinstance(by, Emitted):
            new_axes, emitted[name] = _emitted(by, prefix, plain, layer)
        elif isinstance(by, Chunks):
            new_axes, emitted[name] = _chunked(by, prefix, plain, layer, channels)
        else:
            raise UserError(f"{name} is parametrised by something that growlab does not know; growth cannot widen it.")
        axes |= new_axes
    return replace(
        graph,
        groups=units,
        axes=axes,
        layers=tuple(emitted.get(layer.weight, layer) for layer in graph.layers),
        written={place: _in_units(axis, channels) for place, axis in graph.written.items()},
        channel_norms=tuple(replace(norm, axis=_in_units(norm.axis, channels)) for norm in graph.channel_norms),
        attentions=tuple(
            replace(
                attention,
                axis=_in_units(attention.axis, channels),
                queries=tuple(part for name in attention.queries for part in _linear(name, emitted.get(name))),
            )
            for attention in graph.attentions
        ),
    )


def _emitted(
    by: Emitted, prefix: str, plain: tuple[Axis, ...], layer: Layer
) -> tuple[dict[str, tuple[Axis, ...]], Layer]:
    """Return the axes of H and beta, and the layer with them in place of its weight."""
    features, weight = by.output.weight.shape[-1], f"{prefix}.0.output.weight"
    axes = {f"{prefix}.original": plain, weight: (*plain, _fixed(features))}
    variance = 1 / (features * (1 + by.features.embedding.noise**2 / 3))
    return axes, replace(
        layer,
        weight=weight,
        offset=f"{prefix}.original",
        inputs_per_entry=1 / features,
        outputs_per_entry=1 / features,
        variance_per_entry=variance,
    )


def _chunked(
    by: Chunks, prefix: str, plain: tuple[Axis, ...], layer: Layer, channels: int
) -> tuple[dict[str, tuple[Axis, ...]], Layer]:
    """Return the axes of the tensors of chunks, and the layer with the gains in place of its weight."""
    rows, columns = (_in_units(axis, channels) for axis in plain[:2])
    # The blocked dimension has one position per chunk.
    blocked = [rows, _blocks(columns, channels)] if by.by_inputs else [_blocks(rows, channels), columns]
    tensors = {"embedding.values": by.embedding.values, "weight": by.weight, "bias": by.bias}
    axes: dict[str, tuple[Axis, ...]] = {f"{prefix}.original": tuple(blocked)}
    axes |= {f"{prefix}.0.{n}": (*blocked, *(_fixed(s) for s in tensor.shape[2:])) for n, tensor in tensors.items()}
    kernel = prod(by.kernel)
    return axes, replace(
        layer,
        weight=f"{prefix}.original",
        emitters=tuple(f"{prefix}.0.{name}" for name in tensors),
        inputs_per_entry=kernel * (channels if by.by_inputs else 1),
        outputs_per_entry=kernel * (1 if by.by_inputs or layer.depthwise else channels),
    )


def _linear(name: str, layer: Layer | None) -> list[str]:
    """Names of the tensors that a (possibly emitted) tensor is linear in: scaling all of them scales it."""
    return [name] if layer is None else [n for n in (layer.weight, layer.offset) if n is not None]


def _fixed(size: int) -> Axis:
    return Axis((Part(None, size),), "fixed")


def _in_units(axis: Axis, channels: int) -> Axis:
    """Express an axis with widths counted in blocks of channels."""
    parts = [part if part.group is None else replace(part, inner=part.inner * channels) for part in axis.parts]
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


_RULES = ("hyperfan_in", "hyperfan_out")
_SHARINGS = ("layer", "chunk")


@dataclass(frozen=True)
class EmittedWeights(NewWeights):
    """Initialises new entries of the tensors that emit weights by `init`."""

    init: Initialisation = field(default_factory=Initialisation)

    def std(self, context: GrowthContext, layer: Layer) -> float:
        """Standard deviation of new entries; gains of chunks are 1."""
        return 1.0 if layer.emitters else super().std(context, layer)

    def draw(self, context: GrowthContext, name: str) -> Tensor:
        """Return a tensor of the new shape with every entry initialised as new.

        A new channel of chunks is emitted at the trained scale, by the same output layer as the others. Its running
        variance is therefore the mean of their second moments, if above 1. With 1, activations of new channels in eval
        mode could grow from layer to layer until twins no longer cancel within rounding.
        """
        shape, source = context.new_shape(name), context.generator(name)
        if context.graph.emitters and context.stage > 0:
            for norm in context.graph.norms:
                if name == norm.running_var and norm.running_mean is not None:
                    mean, variance = (context.reference[key].double() for key in (norm.running_mean, name))
                    return torch.full(shape, max(1.0, float((variance + mean**2).mean())))
        layer = next((x for x in context.graph.layers if name == x.weight or name in x.emitters), None)
        if layer is None or not context.graph.grows(name):
            return super().draw(context, name)
        if name == layer.weight:
            if layer.emitters:
                return torch.ones(shape)
            return self.init.draw(shape, self.std(context, layer) ** 2, source)
        if name.endswith(".embedding.values"):
            return self.init.embedding(shape, Emission(1, 1), source)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        emitted = super().std(context, layer) ** 2
        return self.init.draw(shape, emitted / shape[-1], source)


class Hyperfan(VarianceTransfer):
    """Train a network through a hypernetwork that emits its growing weights, and widen the hypernetwork.

    With `sharing="layer"` a weight is W = H h(e) + beta, H [O, I, ..., K]. At an event, fan-in C before and C' after:

        old H and beta    times sqrt(C / C') if a batch normalisation or the output multiplier compensates
        new H             variance r / (C' K Var(e)); with the fan-out for `new_weights="hyperfan_out"`
        new beta          0

    (Chang et al. 2020, Table 1, at the new widths) and pairs in the first two dimensions of H and beta (Yuan et al.
    2023, Eqs. 2-4): W is linear in both, so pairs of H are pairs of W. With `sharing="chunk"` a new channel has new
    embeddings, one per chunk that it adds, with their input layers; twins have equal embeddings, on the consuming side
    with gains of opposite sign; widths are counted in chunks. `finish` restores the plain network.

    **Preserves** exactly in eval mode, up to `output_factor`; in train mode up to batch normalisation's eps, as
    `VarianceTransfer` does.
    **Departs from the paper**, which does not grow networks. Hidden layers without a norm keep their scale, as in
    `VarianceTransfer`; `rescale_layers_without_batch_norm=True` rescales them. Biases are not emitted.

    With a fixed embedding and one layer, a step of SGD moves W like a step on W itself with 1 + |e|^2 (about 1 + K)
    times the rate: choose the rate accordingly.

    Args:
        new_weights: "hyperfan_in" or "hyperfan_out".
        output_multiplier: undo the scale of the logits by a multiplier on the output.
        rescale_layers_without_batch_norm: rescale hidden layers without a batch normalisation behind them too.
        noise_std: see `GrowthMethod`.
        gain: r of hidden layers; the output layer's is 1.
        sharing: "layer" or "chunk"; see `Hypernet`.
        embedding_features: size of an embedding.
        hidden_features: widths of the hidden layers of h.
        embedding: "fixed" or "trained".
        distribution: "uniform" or "normal".
        chunk_channels: number of channels of a chunk; must divide every width.

    Raises:
        ValueError: a setting is invalid.
    """

    def __init__(
        self,
        new_weights: WeightRule = "hyperfan_in",
        output_multiplier: bool = True,
        rescale_layers_without_batch_norm: bool = False,
        noise_std: float = 0.0,
        gain: float = 2.0,
        sharing: Literal["layer", "chunk"] = "layer",
        embedding_features: int = 8,
        hidden_features: Sequence[int] = (),
        embedding: Literal["fixed", "trained"] = "trained",
        distribution: Literal["uniform", "normal"] = "uniform",
        chunk_channels: int = 2,
    ) -> None:
        super().__init__(
            "fan_in_ratio", output_multiplier, False, rescale_layers_without_batch_norm, noise_std=noise_std, gain=gain
        )
        one_of(_RULES, new_weights=new_weights)
        one_of(_SHARINGS, sharing=sharing)
        fields = (sharing, new_weights, distribution, embedding_features, tuple(hidden_features), embedding)
        self.hypernet = Hypernet(*fields, gain=gain, chunk_channels=chunk_channels)
        self.new_weights = EmittedWeights(gain, 1, new_weights, self.hypernet.variances)

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int) -> WidthGraph:
        """Parametrise the weights of every linear layer and convolution by a hypernetwork."""
        parametrise(network, self.hypernet, seed)
        chunked = self.hypernet.sharing == "chunk"
        prepared = emitted_graph(network, graph, self.hypernet.chunk_channels or 1 if chunked else 1)
        for layer in prepared.layers:
            # A chunk without a twin has gain 0, which must be trainable for the chunk to learn.
            if layer.emitters:
                network.get_parameter(layer.weight).requires_grad_(True)
        return prepared

    def finish(self, network: nn.Module) -> None:
        """Turn the network into a plain one with equal outputs; see `materialize`."""
        materialize(network)
