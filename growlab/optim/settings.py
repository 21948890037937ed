"""Settings of optimizers: checks that torch leaves out, and parameters that should not decay."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from growlab.base.settings import at_least, flag

_NUMBERS = ("lr", "momentum", "dampening", "weight_decay", "eps", "adam_eps", "trust_coefficient")
_FLAGS = ("amsgrad", "maximize", "nesterov")


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise a ValueError for invalid settings that torch accepts, or rejects with an unhelpful TypeError.

    Examples:
        >>> check_settings({"lr": 0.1, "betas": (0.9,)})
        Traceback (most recent call last):
        ValueError: betas must be two numbers, each from 0 to below 1, not (0.9,).
    """
    for name in _NUMBERS:
        # A rate may be a tensor; reading it would synchronise with the GPU.
        if name in settings and not isinstance(settings[name], Tensor):
            at_least(0, **{name: settings[name]})
    for name in _FLAGS:
        if name in settings:
            flag(**{name: settings[name]})
    if "betas" not in settings:
        return
    betas = settings["betas"]
    pair = betas if isinstance(betas, Sequence) and not isinstance(betas, str) else ()
    numbers = [beta for beta in pair if not isinstance(beta, Tensor)]
    real = all(isinstance(beta, Real) and not isinstance(beta, bool) for beta in numbers)
    if len(pair) != 2 or not real or not all(0 <= beta < 1 for beta in numbers):
        raise ValueError(f"betas must be two numbers, each from 0 to below 1, not {betas!r}.")


def without_decay(network: nn.Module) -> list[Tensor]:
    """Parameters that should not decay: scalars, and slopes of `nn.PReLU`, as torch advises.

    A scalar (a tensor without dimensions) is usually a logarithm, of a temperature for example, which decay would pull
    to an arbitrary value. Gains and biases of normalisations and other vectors are not exempt: the papers that growlab
    reproduces decay them, as torch's optimizers do.
    """
    prelus = (module for module in network.modules() if isinstance(module, nn.PReLU))
    slopes = {id(p) for module in prelus for p in module.parameters()}
    return [p for p in network.parameters() if p.dim() == 0 or id(p) in slopes]


def exempt_from_decay(optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
    """Move the network's `without_decay` parameters to a separate group with weight decay 0, in place.

    Does nothing if there are none, if the optimizer has no weight decay, or if it has several groups, which set their
    weight decay separately. Call it before making a learning rate scheduler, which counts the groups.

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
    exempt, group = {id(p) for p in without_decay(network)}, optimizer.param_groups[0]
    moved = [p for p in group["params"] if id(p) in exempt]
    if not moved or len(optimizer.param_groups) > 1 or not group.get("weight_decay"):
        return
    decayed = [p for p in group["params"] if id(p) not in exempt]
    if not decayed:
        group["weight_decay"] = 0.0
        return
    names = dict(zip(map(id, group["params"]), group.get("param_names", ()), strict=False))
    set_params(group, decayed)
    params = [(names[id(p)], p) for p in moved] if names else moved
    optimizer.add_param_group({"params": params, "weight_decay": 0.0})


def set_params(group: dict[str, Any], params: Sequence[Tensor], names: Mapping[int, str] | None = None) -> None:
    """Set a group's parameters, and its `param_names` if it has any; new parameters get their `names`, by `id`."""
    if "param_names" in group:
        known = {**(names or {}), **dict(zip(map(id, group["params"]), group["param_names"], strict=True))}
        group["param_names"] = [known[id(p)] for p in params]
    group["params"][:] = params
