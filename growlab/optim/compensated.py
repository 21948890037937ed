"""Divide optimizer steps by the multipliers of weights, so that the multiplied weights move by plain steps."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from growlab.optim.muon import Muon


class Compensated:
    """Divide an optimizer's steps on weights by the multipliers that the network applies to them.

    Where the network uses m W, a step d of an optimizer that normalises gradients moves m W by d, as if there were no
    multiplier, and decoupled weight decay, which is in proportion to W already, shortens it as before:

        W <- (1 - decay) W + d / m

    Args:
        optimizer: an optimizer of torch or growlab; others may step on copies of weights.
        multipliers: called before each step; returns the multipliers by parameter, which broadcast.
    """

    def __init__(self, optimizer: Optimizer, multipliers: Callable[[], Mapping[Tensor, Tensor]]) -> None:
        self._multipliers = multipliers
        self._before: list[tuple[Tensor, Tensor, Tensor]] = []
        self.handles: list[RemovableHandle] = [
            optimizer.register_step_pre_hook(self._note),
            optimizer.register_step_post_hook(self._divide),
        ]

    @torch.no_grad()
    def _note(self, optimizer: Optimizer, *_: Any) -> None:
        multipliers = self._multipliers()
        self._before = [
            (param, param * (1.0 - _decay(optimizer, group)), multipliers[param].to(param))
            for group in optimizer.param_groups
            for param in group["params"]
            if param in multipliers
        ]

    @torch.no_grad()
    def _divide(self, *_: Any) -> None:
        for param, kept, multipliers in self._before:
            # A closure may have computed the gradient within the step.
            if param.grad is not None:
                param.copy_(kept + (param - kept) / multipliers)
        self._before = []


def is_known(optimizer: Optimizer) -> bool:
    """True if an optimizer is torch's or growlab's, or derived from one of these."""
    kinds = (kind.__module__ for kind in type(optimizer).__mro__ if kind is not Optimizer)
    return any(module.startswith(("torch.optim.", "growlab.optim.")) for module in kinds)


def _decay(optimizer: Optimizer, group: Mapping[str, Any]) -> float:
    """Return the share by which decoupled weight decay shortens weights in a step."""
    always = isinstance(optimizer, (torch.optim.Adafactor, torch.optim.Muon, Muon))
    decoupled = group.get("decoupled_weight_decay", always)
    return float(group["lr"]) * float(group["weight_decay"]) if decoupled else 0.0
