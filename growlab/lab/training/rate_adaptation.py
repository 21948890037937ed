"""How a run's rates follow the regions of its weights."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from growlab.base.errors import UserError
from growlab.optim import RateRule, Regional


@dataclass(frozen=True)
class RateAdaptation:
    """How the rates of regions follow their norms; see `growlab.optim`.

    Attributes:
        rule: factors from norms, or None for one global rate.
        output_fan_in: divide the output layers' rate by their fan-in in the seed (Table 1: 1 / C_0).
        optimizers: class names of the optimizers it is for; empty for all of `growlab.optim`.

    Raises:
        UserError: the output layers' rate is to be divided, but nothing sets rates by region.
    """

    rule: RateRule | None = None
    output_fan_in: bool = False
    optimizers: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.output_fan_in and self.rule is None:
            raise UserError(
                "lr_adapt.output_fan_in=true needs rates by region: choose lr_adapt=mup for one rate."
            )

    def apply(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer adapt its rates, in place.

        Raises:
            UserError: it is none that these rates are for.
        """
        if self.rule is None:
            return
        if not isinstance(optimizer, Regional) or (
            self.optimizers and type(optimizer).__name__ not in self.optimizers
        ):
            raise UserError(
                f"this lr_adapt works with the optimizers {', '.join(self.optimizers) or 'of growlab.optim'}, not "
                f"{type(optimizer).__module__}.{type(optimizer).__name__}; choose one of them with optimizer=..., or "
                "lr_adapt=none."
            )
        optimizer.rule, optimizer.output_fan_in = self.rule, self.output_fan_in
