"""Grow a network whose weights a hypernetwork emits, by widening the hypernetwork."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from growlab.base.settings import one_of, sorted_into
from growlab.growth import Expansion, NewWeights, VarianceTransfer
from growlab.growth.method import WeightRule
from growlab.parts.hypernets.initialisations import Emission, Initialisation
from growlab.parts.hypernets.parametrise import Hypernet, materialize, parametrise
from growlab.parts.hypernets.width_graph import emitted_graph
from growlab.widths import Layer, WidthGraph

_RULES = ("hyperfan_in", "hyperfan_out")
_SHARINGS = ("layer", "chunk")


@dataclass(frozen=True)
class EmittedWeights(NewWeights):
    """Initialisation of new entries in the tensors that emit weights.

    Attributes:
        init: the initialisation and its distribution.
    """

    init: Initialisation = field(default_factory=Initialisation)

    def std(self, expansion: Expansion, layer: Layer) -> float:
        """Standard deviation of new entries; gains of chunks are 1."""
        return 1.0 if layer.emitters else super().std(expansion, layer)

    def draw(self, expansion: Expansion, name: str) -> Tensor:
        """Return a tensor of the new shape with every entry initialised as new.

        A new channel of chunks is emitted by the same output layer as the others, at its trained scale. Its running
        variance is therefore the mean of their second moments, if above 1; with 1, activations of new channels in eval
        mode could grow from layer to layer until twins no longer cancel within rounding.
        """
        shape, source = expansion.new_shape(name), expansion.generator(name)
        if expansion.graph.emitters and expansion.stage > 0:
            for norm in expansion.graph.norms:
                if name == norm.running_var and norm.running_mean is not None:
                    mean, variance = (expansion.reference[key].double() for key in (norm.running_mean, name))
                    return torch.full(shape, max(1.0, float((variance + mean**2).mean())))
        layer = next((x for x in expansion.graph.layers if name == x.weight or name in x.emitters), None)
        if layer is None or not expansion.graph.grows(name):
            return super().draw(expansion, name)
        if name == layer.weight:
            if layer.emitters:
                return torch.ones(shape)
            return self.init.draw(shape, self.std(expansion, layer) ** 2, source)
        if name.endswith(".embedding.values"):
            return self.init.embedding(shape, Emission(1, 1), source)
        if name.endswith(".bias"):
            return torch.zeros(shape)
        emitted = super().std(expansion, layer) ** 2
        return self.init.draw(shape, emitted / shape[-1], source)


@dataclass(frozen=True)
class Emitting:
    """Settings of the hypernetwork of a growing network.

    Attributes:
        sharing: "layer" or "chunk"; see `Hypernet`.
        embedding_features: size of an embedding.
        hidden_features: widths of the hidden layers of h.
        embedding: "fixed" or "trained".
        distribution: "uniform" or "normal".
        chunk_channels: number of channels of a chunk; must divide every width.
    """

    sharing: Literal["layer", "chunk"] = "layer"
    embedding_features: int = 8
    hidden_features: Sequence[int] = ()
    embedding: Literal["fixed", "trained"] = "trained"
    distribution: Literal["uniform", "normal"] = "uniform"
    chunk_channels: int = 2


class Hyperfan(VarianceTransfer):
    """Train a network through a hypernetwork that emits its growing weights, and widen the hypernetwork.

    With `sharing="layer"` a weight is W = H h(e) + beta, H [O, I, ..., K]. At an event, fan-in C before and C' after:

        old H and beta    times sqrt(C / C') if a batch normalisation or the output multiplier compensates
        new H             variance r / (C' K Var(e)); with the fan-out for `new_weights="hyperfan_out"`
        new beta          0

    (Chang et al. 2020, Table 1, at the new widths) and pairs in the first two dimensions of H and beta (Yuan et al.
    2023, Eqs. 2-4): W is linear in both, so pairs of H are pairs of W. With `sharing="chunk"` a new channel has new
    embeddings, one per chunk that it adds, with their input layers; twins have equal embeddings, on the consuming side
    with gains of opposite sign. Widths are counted in chunks there. `finish` returns to the plain network.

    **Preserves** exactly in eval mode, up to `output_factor`; in train mode up to batch normalisation's eps, as
    `VarianceTransfer` does.
    **Departs from the paper**, which does not grow networks. Hidden layers without a norm keep their scale, as in
    `VarianceTransfer`; `rescale_unnormalised=True` rescales them. Biases are not emitted.

    With a fixed embedding and one layer, a step of SGD moves W like a step on W itself with 1 + |e|^2 (about 1 + K)
    times the rate: choose the rate accordingly.

    Args:
        new_weights: "hyperfan_in" or "hyperfan_out".
        output_multiplier: undo the scale of the logits by a multiplier on the output.
        rescale_unnormalised: rescale hidden layers without a batch normalisation behind them too.
        noise_std: see `GrowthMethod`.
        gain: r of hidden layers; the output layer's is 1.
        settings: fields of `Emitting`.

    Raises:
        ValueError: a setting is invalid.
        TypeError: a setting is unknown.
    """

    SETTINGS = (Emitting,)

    def __init__(
        self,
        new_weights: WeightRule = "hyperfan_in",
        output_multiplier: bool = True,
        rescale_unnormalised: bool = False,
        noise_std: float = 0.0,
        gain: float = 2.0,
        **settings: Any,
    ) -> None:
        super().__init__(
            "ratio", output_multiplier, False, rescale_unnormalised, noise_std=noise_std, gain=gain
        )
        (kind,) = sorted_into(self.SETTINGS, settings, "Hyperfan")
        one_of(_RULES, new_weights=new_weights)
        one_of(_SHARINGS, sharing=kind.sharing)
        self.hypernet = Hypernet(
            kind.sharing,
            new_weights,
            kind.distribution,
            kind.embedding_features,
            tuple(kind.hidden_features),
            kind.embedding,
            gain=gain,
            chunk_channels=kind.chunk_channels,
        )
        self.new_weights = EmittedWeights(gain, 1, new_weights, self.hypernet.variances)

    def prepare(self, network: nn.Module, graph: WidthGraph, seed: int) -> WidthGraph:
        """Parametrise the weights of every linear layer and convolution by a hypernetwork."""
        parametrise(network, self.hypernet, seed)
        chunked = self.hypernet.sharing == "chunk"
        prepared = emitted_graph(network, graph, self.hypernet.chunk_channels or 1 if chunked else 1)
        for layer in prepared.layers:
            # A chunk without a twin has gain 0, which has to be trainable for it to learn.
            if layer.emitters:
                network.get_parameter(layer.weight).requires_grad_(True)
        return prepared

    def finish(self, network: nn.Module) -> None:
        """Turn the network into a plain one with equal outputs; see `materialize`."""
        materialize(network)
