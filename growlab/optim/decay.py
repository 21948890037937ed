"""Exempt parameters from weight decay."""

import torch
from torch import Tensor, nn


def without_decay(network: nn.Module) -> list[Tensor]:
    """Parameters that should not decay: single numbers, and slopes of `nn.PReLU`, as torch advises.

    A single number (a tensor without dimensions) is a logarithm, such as that of a length, a blend or a temperature:
    decay would pull it to an arbitrary value. Gains and biases of normalisations and other vectors are not
        exempt: the papers that growlab reproduces decay them, as torch's optimizers do.
    """
    slopes = {
        id(p) for module in network.modules() if isinstance(module, nn.PReLU) for p in module.parameters()
    }
    return [p for p in network.parameters() if p.dim() == 0 or id(p) in slopes]


def exempt_from_decay(optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
    """Move the network's `without_decay` parameters to a separate group with weight decay 0, in place.

    Does nothing if there are none, if the optimizer has no weight decay, or if it has several groups, which set their
    weight decay separately. Call it before a learning rate scheduler is made, which counts the groups.

    Args:
        optimizer: an optimizer of the network's parameters.
        network: the network.

    Examples:
        >>> network = nn.Sequential(nn.Linear(2, 3), nn.PReLU())
        >>> optimizer = torch.optim.SGD(network.parameters(), lr=0.1, weight_decay=0.01)
        >>> exempt_from_decay(optimizer, network)
        >>> [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        [(2, 0.01), (1, 0.0)]
    """
    exempt = {id(p): p for p in without_decay(network)}
    group = optimizer.param_groups[0]
    if not exempt or len(optimizer.param_groups) > 1 or not group.get("weight_decay"):
        return
    decayed = [p for p in group["params"] if id(p) not in exempt]
    if not decayed:
        group["weight_decay"] = 0.0
        return
    group["params"][:] = decayed
    optimizer.add_param_group({"params": list(exempt.values()), "weight_decay": 0.0})
