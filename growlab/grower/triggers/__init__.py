"""Triggers: decide the next widths and when to grow."""

from growlab.grower.triggers.at import At, ByMethod, Never, Scheduled, as_trigger
from growlab.grower.triggers.controller import Controller
from growlab.grower.triggers.demand import (
    Budget,
    Demand,
    Expressivity,
    GradientNorm,
    OnDemand,
    Plateau,
    Progress,
    cheapest_remaining_cost,
)
from growlab.grower.triggers.trigger import Clock, Declined, GrowingNetwork, Training, Trigger, Widths

__all__ = [
    "At",
    "Budget",
    "ByMethod",
    "Clock",
    "Controller",
    "Declined",
    "Demand",
    "Expressivity",
    "GradientNorm",
    "GrowingNetwork",
    "Never",
    "OnDemand",
    "Plateau",
    "Progress",
    "Scheduled",
    "Training",
    "Trigger",
    "Widths",
    "as_trigger",
    "cheapest_remaining_cost",
]
