"""The table of odd networks: each a forward over a few modules, written as if there were no width groups."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.cases import Around

# In train mode, variance transfer is exact up to batch normalisation's eps.
Norm1d, Norm2d = partial(nn.BatchNorm1d, eps=1e-14), partial(nn.BatchNorm2d, eps=1e-14)
Conv = partial(nn.Conv2d, padding=1)

SOURCE = torch.Generator().manual_seed(3)
torch.manual_seed(0)


@dataclass(frozen=True)
class OddNetwork:
    """A small network.

    Attributes:
        make: builds it at full width.
        inputs: example inputs.
        last: parts that no other affine map stands behind, by the rule for output layers.
        groups: width groups that must be found, by full width; None for any.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    last: tuple[str, ...]
    groups: Mapping[str, int] | None


ODD_NETWORKS: dict[str, OddNetwork] = {}


def net(run: Callable[..., Any], **parts: Any) -> Around:
    """A forward over parts: `[in, out]` is a linear layer, a tensor a parameter."""
    bare = {name: p for name, p in parts.items() if isinstance(p, Tensor) and not isinstance(p, nn.Buffer)}
    return Around(run, **parts | {name: nn.Parameter(p) for name, p in bare.items()})


def real(*shape: int) -> Tensor:
    """Numbers, [4, *shape]."""
    return torch.randn(4, *shape, generator=SOURCE, dtype=torch.float64)


def tokens(length: int, count: int = 11) -> Tensor:
    """Indices below count, [4, length]."""
    return torch.randint(count, (4, length), generator=SOURCE)


def made(*inputs: Tensor, last: str = "c", groups: Mapping[str, int] | None = None) -> Callable[..., Any]:
    """Put a factory into the table, under its name."""

    def put(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        ODD_NETWORKS[make.__name__] = OddNetwork(make, inputs, tuple(last.split()), groups)
        return make

    return put


def odd(*inputs: Tensor, last: str = "c", groups: Mapping[str, int] | None = None, **parts: Any) -> Callable[..., Any]:
    """Put a forward over parts into the table, under its name."""

    def put(run: Callable[..., Any]) -> Callable[..., Any]:
        network = net(run, **parts)
        ODD_NETWORKS[run.__name__] = OddNetwork(partial(copy.deepcopy, network), inputs, tuple(last.split()), groups)
        return run

    return put
