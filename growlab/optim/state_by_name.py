"""Optimizer state by parameter name, so that another run of the same network can go on with it."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def named_state(optimizer: torch.optim.Optimizer, network: nn.Module) -> dict[str, Any]:
    """A copy of an optimizer's state on the CPU, in plain containers, by the names of a network's parameters.

    Args:
        optimizer: any.
        network: whose parameters it has trained; state of other parameters is left out.

    Returns:
        "class": the optimizer's; "state": by parameter name; "entries": of no parameter.
        `torch.load(weights_only=True)` reads it from a file.

    Raises:
        ValueError: state that is neither tensors nor numbers.
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
    """Let an optimizer go on with the state that `named_state` took; its settings and groups stay its own.

    Args:
        optimizer: of the same class.
        network: with the parameters that it holds; of those that have no saved state it begins anew.
        saved: from `named_state`.

    Raises:
        ValueError: it is of another class, or of parameters of other shapes.
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
    # Through the optimizer's own loading, which places tensors on devices and knows their precision.
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
