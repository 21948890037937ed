"""What a network costs at a stage of its growth."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from growlab.grower.cost import forward_flops
from growlab.grower.part import Part
from growlab.grower.triggers import Widths
from growlab.growth.outputs import network_inputs
from growlab.widths import WidthGraph, resize
from growlab.widths.inputs import Example, changed


class StageCost:
    """Forward FLOPs per sample of a network at any stage of its growth.

    Args:
        network: as `growlab.grower.trace_for_growth` left it, at full width; copied.
        graph: what it returned.
        parts: features beside growing.
        example: inputs, [B, ...], a tuple of them or inputs by name; the first sample is taken.
    """

    def __init__(
        self,
        network: nn.Module,
        graph: WidthGraph,
        parts: Sequence[Part],
        example: Example,
    ) -> None:
        self._network, self._graph, self._parts = copy.deepcopy(network), graph, tuple(parts)
        inputs = network_inputs(example, network)
        self._sample = changed(lambda x: x[:1] if isinstance(x, Tensor) else x, inputs)
        self._known: dict[tuple[Any, ...], int] = {}

    def __call__(self, widths: Widths, share: float | None = None) -> int:
        """FLOPs at these widths, when a share of all growth is done; None: of the whole network and whole inputs."""
        key = (*(widths[group] for group in self._graph.groups), share)
        if key not in self._known:
            sample = self._sample
            for part in () if share is None else self._parts:
                sample = part.inputs_at(sample, share)
            self._known[key] = forward_flops(self.copy_at(widths, share), sample)
        return self._known[key]

    def copy_at(self, widths: Widths, share: float | None = None) -> nn.Module:
        """A copy of the network at these widths."""
        copied, graph = copy.deepcopy(self._network), self._graph
        for part in () if share is None else self._parts:
            graph = part.shrink_to(copied, graph, share)
        resize(copied, graph, graph.full_widths, widths)
        return copied
