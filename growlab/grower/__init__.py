"""The engine: a network that grows in anyone's training."""

from growlab.grower.grower import Grower
from growlab.grower.preparing import forecast, no_widths, prepared

__all__ = ["Grower", "forecast", "no_widths", "prepared"]
