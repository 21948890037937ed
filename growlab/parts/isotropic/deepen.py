"""Grow an isotropic network in depth by identity layers (Bird, Section 3.2)."""

from torch import nn

from growlab.parts.isotropic.activations import Blend, IsotropicActivation


def deepen(
    layers: nn.Sequential, position: int, activation: IsotropicActivation | None = None
) -> list[nn.Parameter]:
    """Insert a linear layer and an activation, initialised as the identity.

    The weight is the identity matrix, the bias zero, and the activation f*(x; a) = a x + (1 - a) f(x) starts at a = 1.

    **Preserves** the output exactly. All three are trained: `a` has a gradient from the first step, and f takes effect
    as it moves away from 1.

    Args:
        layers: the network's layers; changed in place.
        position: index in `layers` after which to insert; the output of the module there is [B, n].
        activation: f; None for isotropic tanh with a trained intrinsic length.

    Returns:
        The new parameters, for `optimizer.add_param_group`. Trace the network again before its widths change.

    Raises:
        ValueError: there is no linear layer at or before the position, which determines the width.

    Examples:
        >>> import torch
        >>> layers = nn.Sequential(nn.Linear(4, 3), IsotropicActivation())
        >>> x = torch.randn(5, 4)
        >>> before = layers(x)
        >>> new = deepen(layers, 1)
        >>> torch.equal(layers(x), before), len(layers), sum(p.numel() for p in new)
        (True, 4, 14)
    """
    linear = [module for module in layers[: position + 1] if isinstance(module, nn.Linear)]
    if not 0 <= position < len(layers) or not linear:
        raise ValueError(f"there is no linear layer at or before position {position} of {len(layers)} layers")
    reference = linear[-1].weight
    identity = nn.Linear(len(reference), len(reference))
    nn.init.eye_(identity.weight)
    nn.init.zeros_(identity.bias)
    new = nn.Sequential(identity, Blend(activation or IsotropicActivation())).to(
        reference.device, reference.dtype
    )
    for offset, module in enumerate(new, start=1):
        layers.insert(position + offset, module)
    return list(new.parameters())
