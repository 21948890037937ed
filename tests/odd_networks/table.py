"""Networks that are in no other table: odd ends, casts, shared modules, several heads, no norms, many kinds of inputs.

Each is a forward function over a few modules, as someone writes it who has never heard of width groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

# In train mode, variance transfer is exact up to batch normalisation's eps.
Norm1d, Norm2d = partial(nn.BatchNorm1d, eps=1e-14), partial(nn.BatchNorm2d, eps=1e-14)
Linear, Conv = nn.Linear, partial(nn.Conv2d, padding=1)

SOURCE = torch.Generator().manual_seed(3)


@dataclass(frozen=True)
class OddNetwork:
    """A small network.

    Attributes:
        make: builds it at full width.
        inputs: example inputs.
        last: parts that no other affine map stands behind, by the rule for output layers.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    last: tuple[str, ...]


ODD_NETWORKS: dict[str, OddNetwork] = {}


class Net(nn.Module):
    """Modules, bare parameters and what is computed with them."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, nn.Parameter(part) if isinstance(part, Tensor) else part)

    def forward(self, *inputs: Tensor) -> Any:
        return self.run(self, *inputs)


def real(*shape: int) -> Tensor:
    """Numbers, [4, *shape]."""
    return torch.randn(4, *shape, generator=SOURCE, dtype=torch.float64)


def tokens(length: int, count: int = 11) -> Tensor:
    """Indices below count, [4, length]."""
    return torch.randint(count, (4, length), generator=SOURCE)


def odd(*inputs: Tensor, last: str = "c") -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Put a factory into the table, under its name."""

    def put(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ODD_NETWORKS[make.__name__] = OddNetwork(make, inputs, tuple(last.split()))
        return make

    return put
