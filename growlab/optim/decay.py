"""Parameters that weight decay leaves alone."""

import torch
from torch import Tensor, nn


def without_decay(network: nn.Module) -> list[Tensor]:
    """Parameters for which smaller is not simpler: single numbers, and slopes of `nn.PReLU`, as torch advises.

    A single number (a tensor without dimensions) is a logarithm, such as that of a length, a blend or a
    temperature: decay would pull it to a value of no meaning. Gains and biases of normalisations and other vectors are
    not among them: the papers that growlab reproduces decay them, as torch's optimizers do.
    """
    slopes = {
        id(p) for module in network.modules() if isinstance(module, nn.PReLU) for p in module.parameters()
    }
    return [p for p in network.parameters() if p.dim() == 0 or id(p) in slopes]


def exempt_from_decay(optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
    """Move the network's `without_decay` parameters to a group of their own with weight decay 0, in place.

    Nothing happens where there are none, where the optimizer does not decay, and where it has several groups, each
    with a weight decay of its own. Call it before a schedule of the rate is made, which counts the groups.

    Args:
        optimizer: over the network's parameters.
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
