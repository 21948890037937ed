"""Save and load optimizer state by parameter name, to continue in another run of the same network."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def named_state(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, Any]:
    """Copy an optimizer's state to the CPU, in plain containers, by the names of a network's parameters.

    Args:
        optimizer: any.
        network: the network that it trains; state of other parameters is left out.

    Returns:
        "class": the optimizer's class; "state": state by parameter name; "entries": state of no parameter. It can be
        read from a file with `torch.load(weights_only=True)`.

    Raises:
        ValueError: state contains an object other than tensors, numbers and plain containers.
    """
    state = {
        name: _plain(dict(optimizer.state[parameter]), f"{type(optimizer).__name__}'s state of {name}")
        for name, parameter in network.named_parameters()
        if parameter in optimizer.state
    }
    entries = {
        name: _plain(value, f"{type(optimizer).__name__}'s {name!r}")
        for name, value in optimizer.state.items()
        if not isinstance(name, Tensor)
    }
    return {"class": _class_of(optimizer), "state": state, "entries": entries}


def load_named_state(optimizer: torch.optim.Optimizer, network: nn.Module, saved: Mapping[str, Any]) -> None:
    """Load state saved by `named_state` into an optimizer; its settings and groups are unchanged.

    Args:
        optimizer: an optimizer of the same class.
        network: the network that it trains; parameters without saved state start without state.
        saved: result of `named_state`.

    Raises:
        ValueError: it belongs to another class of optimizer, or to parameters of other shapes.
    """
    if saved["class"] != _class_of(optimizer):
        raise ValueError(f"it is of {saved['class']}, not of {_class_of(optimizer)}.")
    names = {parameter: name for name, parameter in network.named_parameters()}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[Any, Any] = {
        key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)
    }
    state |= saved.get("entries", {})
    for index, parameter in enumerate(held):
        name = names.get(parameter, "")
        if name in saved["state"]:
            state[index] = saved["state"][name]
            for key, value in state[index].items():
                if isinstance(value, Tensor) and value.numel() != 1 and value.shape != parameter.shape:
                    raise ValueError(f"{key} of {name} is {list(value.shape)}, not {list(parameter.shape)}.")
    # `load_state_dict` moves tensors to the parameters' devices and precisions.
    optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(state)})


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def _plain(value: Any, what: str) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, Mapping):
        return {key: _plain(one, what) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one, what) for one in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{what} holds a {type(value).__name__}.")
