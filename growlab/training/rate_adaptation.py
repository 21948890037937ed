"""How a run's rates follow the regions of its weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from growlab.errors import UserError
from growlab.optim import RateRule


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
