"""Triggers: which widths come next, and when."""

from growlab.triggers.at import At, Never, Scheduled, as_trigger
from growlab.triggers.decided import Decided
from growlab.triggers.trigger import Clock, Run, Trigger, Widths

__all__ = ["At", "Clock", "Decided", "Never", "Run", "Scheduled", "Trigger", "Widths", "as_trigger"]
