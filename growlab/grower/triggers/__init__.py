"""Triggers: which widths come next, and when."""

from growlab.grower.triggers.at import At, Never, Scheduled, as_trigger
from growlab.grower.triggers.decided import Decided
from growlab.grower.triggers.demand import Budget, Demand, Expressivity, GradientNorm, Plateau, Progress
from growlab.grower.triggers.on_demand import OnDemand, climb
from growlab.grower.triggers.trigger import Clock, Run, Training, Trigger, Widths

__all__ = [
    "At",
    "Budget",
    "Clock",
    "Decided",
    "Demand",
    "Expressivity",
    "GradientNorm",
    "Never",
    "OnDemand",
    "Plateau",
    "Progress",
    "Run",
    "Scheduled",
    "Training",
    "Trigger",
    "Widths",
    "as_trigger",
    "climb",
]
