"""Carry an optimizer through a growth event: same object, same parameter groups, new parameters."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from growlab.widths import WidthGraph, grid

Inheritance = Literal["reset", "zero_new"]


def follow(
    optimizer: torch.optim.Optimizer,
    replaced: Mapping[str, tuple[Tensor, Tensor]],
    graph: WidthGraph,
    widths_before: Mapping[str, int],
    widths_after: Mapping[str, int],
    inheritance: Inheritance,
) -> None:
    """Let an optimizer track the parameters of a grown network, in place.

    Schedulers, scalers and loggers hold references to the optimizer and its groups, so neither is replaced.

    Args:
        optimizer: any `torch.optim.Optimizer`.
        replaced: old and new tensor by name, from the growth event.
        graph: the network's width graph.
        widths_before, widths_after: width of each group.
        inheritance: "reset" forgets all state (the paper's rule for SGD's momentum); "zero_new" carries
            parameter-shaped state to the new places and sets it to zero at new entries, and keeps counts.

    Raises:
        ValueError: with "zero_new", state that is neither shaped like its parameter nor a count.
    """
    by_identity = {id(old): (name, new) for name, (old, new) in replaced.items()}
    if inheritance == "reset":
        optimizer.state.clear()
    for group in optimizer.param_groups:
        for index, param in enumerate(group["params"]):
            if id(param) not in by_identity:
                continue
            name, new = by_identity[id(param)]
            group["params"][index] = new
            if param in optimizer.state:
                state = optimizer.state.pop(param)
                positions = [axis.kept(widths_before, widths_after) for axis in graph.axes[name]]
                optimizer.state[new] = {
                    key: _carried(value, param, new, positions, f"{type(optimizer).__name__}'s {key!r}")
                    for key, value in state.items()
                }


def _carried(value: Any, old: Tensor, new: Tensor, positions: list[Tensor], what: str) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.shape == old.shape:
        carried = torch.zeros_like(new, dtype=value.dtype)
        carried[grid(positions, new.device)] = value
        return carried
    if value.numel() == 1:
        return value
    raise ValueError(
        f"{what} has shape {tuple(value.shape)}, its parameter {tuple(old.shape)}: growlab cannot carry it "
        "through growth; use optimizer_state=reset."
    )
