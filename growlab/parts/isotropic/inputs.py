"""More or fewer inputs of a network, in a loop of one's own (the author's later code has it too)."""

import torch
from torch import Tensor, nn

from growlab.optim.exchanging import exchange


def change_inputs(layer: nn.Linear | nn.Conv2d, count: int, *optimizers: torch.optim.Optimizer) -> None:
    """Let a first layer read more inputs behind those that it has, with weights of zero, or leave out the last ones.

    **Preserves** the output exactly on growth, whatever the new inputs are, and where inputs of zeros are left out. New
    weights learn from the first step, since their gradient is that of the layer's output times the new inputs.

    Args:
        layer: changed in place; inputs of a flattened sample, or channels of an image.
        count: of inputs that come, or, below 0, of the last ones that go.
        optimizers: that hold its weight; they keep their state, with zeros for what is new.

    Raises:
        ValueError: nothing would be left, or the layer has groups or reads the gain of an activation before it.

    Trace the network anew before its widths change.

    Examples:
        >>> layer, x = nn.Linear(3, 2), torch.randn(5, 3)
        >>> before = layer(x)
        >>> change_inputs(layer, 2)
        >>> torch.allclose(layer(torch.cat([x, torch.randn(5, 2)], 1)), before)
        True
    """
    old = layer.weight
    inputs = old.shape[1]
    if inputs + count < 1:
        raise ValueError(f"{-count} of {inputs} inputs cannot go: a layer keeps at least one")
    if getattr(layer, "reads_gain", False) or getattr(layer, "groups", 1) != 1:
        raise ValueError(
            "only a layer that reads all its inputs, and no gain behind them, can have more or fewer"
        )
    new = nn.Parameter(_resized(old.detach(), count), old.requires_grad)
    for optimizer in optimizers:
        for name, value in optimizer.state.get(old, {}).items():
            if isinstance(value, Tensor) and value.shape == old.shape:
                optimizer.state[old][name] = _resized(value, count)
        exchange(optimizer, {id(old): new})
    layer.weight = new
    if isinstance(layer, nn.Linear):
        layer.in_features += count
    else:
        layer.in_channels += count


def _resized(tensor: Tensor, count: int) -> Tensor:
    if count < 0:
        return tensor[:, :count].clone()
    return torch.cat([tensor, tensor.new_zeros(len(tensor), count, *tensor.shape[2:])], 1)
