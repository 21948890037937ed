"""Growing networks with training batches, for methods that use data."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from growlab.growth import GrowthContext, GrowthEvent, GrowthMethod, Measurement
from growlab.growth.fans import GroupTensors, group_tensors
from growlab.widths import tensors_of
from tests.cases import Growing

Loss = Callable[[Tensor, Tensor], Tensor]


class Started(Growing):
    """A growing network and the batches that its events use."""

    batches: list[tuple[Tensor, Tensor]]

    def data(self, loss: Loss = F.cross_entropy) -> Measurement:
        return Measurement(self.network, self.graph, self.batches, loss)

    def tensors(self) -> dict[str, Tensor]:
        return tensors_of(self.network, self.graph)

    def context(self, more: int = 0) -> tuple[GrowthContext, list[GroupTensors]]:
        """Context of an event that adds `more` channels to every group, and the groups' tensors."""
        old = dict(self.state.widths)
        new = {group: width + more for group, width in old.items()}
        return GrowthContext(self.graph, self.tensors(), old, new, 5, 1), [group_tensors(self.graph, g) for g in old]

    def grow(self, widths: dict[str, int], loss: Loss = F.cross_entropy) -> tuple[GrowthEvent, Measurement]:
        data = self.data(loss)
        return super().grow(widths, 5, data=data), data

    def widen(self, more: int) -> tuple[GrowthEvent, Measurement]:
        """Grow every group by `more` channels."""
        return self.grow({group: width + more for group, width in self.state.widths.items()})

    def loss(self) -> Tensor:
        """Mean loss over the batches, in train mode."""
        self.network.train()
        return torch.stack([F.cross_entropy(self.network(x), y) for x, y in self.batches]).mean()


def started(
    network: nn.Module,
    shape: Sequence[int],
    method: GrowthMethod,
    part: float = 0.5,
    num_batches: int = 2,
    size: int = 12,
) -> Started:
    """Reinitialise a network deterministically and shrink it to a part of its widths."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(reset := getattr(module, "reset_parameters", None), Callable):
            reset()
    source = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(size, *shape, generator=source, dtype=torch.float64), torch.randint(3, (size,), generator=source))
        for _ in range(num_batches)
    ]
    run = Started(network.double(), batches[0][0], method, part, seed=5)
    run.batches = batches
    return run


def with_one(x: Tensor) -> Tensor:
    """Append a constant 1, the input of the bias."""
    return torch.cat([x, torch.ones(*x.shape[:-1], 1, dtype=x.dtype)], -1)


def mlp(activation: nn.Module | None = None, inputs: int = 5) -> nn.Sequential:
    first, second = (activation or nn.Tanh() for _ in range(2))
    return nn.Sequential(nn.Linear(inputs, 8), first, nn.Linear(8, 6), second, nn.Linear(6, 3))


class Residual(nn.Module):
    """A stream that two layers produce, batch normalisation and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.inner, self.back = nn.Conv2d(6, 4, 3, padding=1), nn.Conv2d(4, 6, 1)
        self.depthwise, self.head = nn.Conv2d(6, 6, 3, groups=6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.norm(self.stem(x)))
        x = torch.tanh(x + self.back(torch.tanh(self.inner(x))))
        return self.head(torch.tanh(self.depthwise(x)).mean((2, 3)))
