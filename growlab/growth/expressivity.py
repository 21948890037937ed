"""Expressivity bottleneck: the functional gradient that a layer cannot follow (Verbockhaven et al. 2024)."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from growlab.growth.fans import Fans, fans_of
from growlab.growth.measurement import Measurement
from growlab.growth.method import Expansion
from growlab.growth.methods.tiny import Tiny, solved
from growlab.growth.moments import moments, usual
from growlab.widths import WidthGraph, tensors_of


@dataclass(frozen=True)
class Bottleneck:
    """Expressivity bottleneck of the layer that consumes a group's channels, per sample.

    Attributes:
        wanted: E|V|^2 with V = -dL/dz at the layer's output z: the change that the loss asks for.
        missing: min over dW of E|V - dW b|^2 with the layer's input b: the part that no change of its weights provides.
    """

    wanted: float
    missing: float


def bottlenecks(
    graph: WidthGraph, widths: Mapping[str, int], data: Measurement, seed: int = 0
) -> dict[str, Bottleneck]:
    """Measure the bottleneck of every growing group for which TINY is defined (Def. 2.3; Prop. 3.1 gives the best dW).

    A layer with more inputs than the batches have output positions can fit any change: use enough batches.

    Args:
        graph: the network's width graph.
        widths: width of each group now.
        data: training batches; costs one forward and one backward pass over them.
        seed: the run's seed.

    Returns:
        Bottlenecks by group; without groups at full width, and those with several producers or consumers.
    """
    tensors = tensors_of(data.model, graph)
    expansion = Expansion(graph, tensors, widths, widths, seed, 0, data=data)
    growing = [
        fans for fans in measurable(graph, data.model) if widths[fans.group] < graph.full_widths[fans.group]
    ]
    if not growing:
        return {}
    found = moments(expansion, data, growing, dict(data.model.named_modules()))
    return {
        fans.group: _bottleneck(found, fans.group)
        for fans in growing
        if float(found[f"calls {fans.consumers[0].name}"]) == 1.0
    }


def out_of_reach(found: Mapping[str, Bottleneck]) -> float:
    """Return sum(missing) / sum(wanted) over all layers; 1 if nothing is wanted."""
    wanted = sum(bottleneck.wanted for bottleneck in found.values())
    return sum(bottleneck.missing for bottleneck in found.values()) / wanted if wanted else 1.0


def measurable(graph: WidthGraph, model: nn.Module) -> list[Fans]:
    """Groups for which a bottleneck is defined: one producer and one consumer, both linear or plain Conv2d."""
    modules, tiny = dict(model.named_modules()), Tiny()
    every = (fans_of(graph, group) for group in graph.groups)
    return [
        fans
        for fans in every
        if tiny.refuses(fans, 1, graph.full_widths[fans.group]) is None
        and all(usual(modules.get(layer.name)) for layer in (fans.producers[0], fans.consumers[0]))
    ]


def _bottleneck(found: Mapping[str, Tensor], group: str) -> Bottleneck:
    goal, wanted = found[f"goal {group}"], float(found[f"wanted {group}"])
    possible = float(torch.sum(goal * solved(found[f"square {group}"], goal)))
    return Bottleneck(wanted, max(0.0, wanted - possible))
