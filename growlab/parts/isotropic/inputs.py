"""Add or remove inputs of a network, in a custom training loop (as in the author's later code)."""

import torch
from torch import Tensor, nn

from growlab.optim.followers import replace_parameters


def change_inputs(layer: nn.Linear | nn.Conv2d, count: int, *optimizers: torch.optim.Optimizer) -> None:
    """Append inputs with zero weights to a first layer, or remove its last ones.

    **Preserves** the output exactly when inputs are added, with any values, and when inputs that are zero are removed.
    New weights learn from the first step, since their gradient is that of the layer's output times the new inputs.

    Args:
        layer: the layer, changed in place; its inputs are a flattened sample, or the channels of an image.
        count: number of inputs to add, or, if negative, to remove from the end.
        optimizers: optimizers of its weight; they keep their state, with zeros for new entries.

    Raises:
        ValueError: no input would remain, or the layer has groups or reads a gain channel.

    Trace the network again before its widths change.

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
        replace_parameters(optimizer, {id(old): new})
    layer.weight = new
    if isinstance(layer, nn.Linear):
        layer.in_features += count
    else:
        layer.in_channels += count


def _resized(tensor: Tensor, count: int) -> Tensor:
    if count < 0:
        return tensor[:, :count].clone()
    return torch.cat([tensor, tensor.new_zeros(len(tensor), count, *tensor.shape[2:])], 1)
