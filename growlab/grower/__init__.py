"""The engine: a network that grows in anyone's training."""

from growlab.grower.events import held
from growlab.grower.grower import Grower
from growlab.grower.preparing import forecast, knows_stages, no_widths, nothing_grows, prepared, seed_widths
from growlab.grower.wrapping import renew

__all__ = [
    "Grower",
    "forecast",
    "held",
    "knows_stages",
    "no_widths",
    "nothing_grows",
    "prepared",
    "renew",
    "seed_widths",
]
