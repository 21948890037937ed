"""Grow an isotropic network in depth by layers that do nothing yet (Bird, Section 3.2)."""

from torch import nn

from growlab.parts.isotropic.activations import Blend, IsotropicActivation


def deepen(
    layers: nn.Sequential, position: int, activation: IsotropicActivation | None = None
) -> list[nn.Parameter]:
    """Insert a linear layer and an activation that together are the identity.

    The weight is the identity matrix, the bias zero, and the activation f*(x; a) = a x + (1 - a) f(x) begins at a = 1.

    **Preserves** the output exactly. All three parts learn: `a` has a gradient from the first step, and f comes in as
    it moves away from 1.

    Args:
        layers: changed in place.
        position: index in `layers` behind which to insert; the module there puts out [B, n].
        activation: f; None for isotropic tanh with an intrinsic length.

    Returns:
        The new parameters, for `optimizer.add_param_group`. Trace the network anew before its widths change.

    Raises:
        ValueError: there is no linear layer at or before the position that tells the width.

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
