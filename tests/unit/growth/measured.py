"""Small networks on their way through one event of a method that looks at data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.growth import GrowthEvent, GrowthMethod, GrowthState, Measurement, grow, make_seed
from growlab.widths import WidthGraph, trace
from tests.cases import roughen


@dataclass
class Started:
    """A planted network, its state and what its events look at."""

    network: nn.Module
    graph: WidthGraph
    state: GrowthState
    method: GrowthMethod
    batches: list[tuple[Tensor, Tensor]]

    def grow(self, widths: dict[str, int], seed: int = 5) -> tuple[GrowthEvent, Measurement]:
        data = Measurement(self.network, self.graph, self.batches, F.cross_entropy)
        probe = (self.batches[0][0],)
        wanted = {**self.state.widths, **widths}
        event = grow(self.network, self.graph, self.method, self.state, wanted, seed, probe, data=data)
        return event, data

    def loss(self) -> Tensor:
        """Mean loss over the batches, in train mode."""
        self.network.train()
        return torch.stack([F.cross_entropy(self.network(x), y) for x, y in self.batches]).mean()


def started(
    network: nn.Module,
    shape: Sequence[int],
    method: GrowthMethod,
    part: float = 0.5,
    num_classes: int = 3,
    num_batches: int = 2,
    size: int = 12,
) -> Started:
    """Plant a network, drawn anew, at a part of its widths; deterministic."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(reset := getattr(module, "reset_parameters", None), Callable):
            reset()
    network = network.double()
    source = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(size, *shape, generator=source, dtype=torch.float64),
            torch.randint(num_classes, (size,), generator=source),
        )
        for _ in range(num_batches)
    ]
    graph = trace(network, batches[0][0][:2])
    widths = {name: max(1, int(group.full_width * part)) for name, group in graph.groups.items()}
    state = make_seed(network, graph, method, widths, 5)
    roughen(network)
    return Started(network, graph, state, method, batches)
