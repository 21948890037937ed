"""Copies of a growing network that Lightning's callbacks keep as averages of its weights."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from lightning import Callback
from lightning.pytorch import callbacks as lightnings
from torch import nn

from growlab.base.errors import UserError

# The second came with Lightning 2.6.
_NAMES = ("StochasticWeightAveraging", "WeightAveraging")
_LIGHTNINGS = tuple(getattr(lightnings, name) for name in _NAMES if hasattr(lightnings, name))


def shapes_of(network: nn.Module) -> dict[str, torch.Size]:
    """Shapes of a network's parameters and buffers, by name."""
    return {name: tensor.shape for name, tensor in network.state_dict().items()}


def averages(
    callbacks: Iterable[Callback],
    network: nn.Module,
    shapes: Mapping[str, torch.Size],
    known: Iterable[nn.Module],
) -> Iterator[nn.Module]:
    """Copies of the network in modules that callbacks hold, such as Lightning's averages and other people's.

    Args:
        callbacks: the trainer's others.
        network: that grows.
        shapes: of the network as callbacks have found it in their `setup`.
        known: what is trained, and copies that were found before; callbacks may hold them too.

    Raises:
        UserError: an average of Lightning's was made before the network became a seed.
    """
    seen = {id(module) for each in known for module in each.modules()}
    for callback in callbacks:
        held = [value for value in vars(callback).values() if isinstance(value, nn.Module)]
        for copy in (module for value in held for module in value.modules() if id(module) not in seen):
            theirs = shapes_of(copy) if type(copy) is type(network) else {}
            if theirs == shapes:
                yield copy
            elif theirs.keys() == shapes.keys() and isinstance(callback, _LIGHTNINGS):
                name = type(callback).__name__
                raise UserError(
                    f"{name} has copied the network before it became a seed: put Growth before it, "
                    f"Trainer(callbacks=[Growth(...), {name}(...)])."
                )
