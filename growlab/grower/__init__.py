"""The engine: grow a network in any training loop."""

from growlab.grower.forecast import Forecast
from growlab.grower.grower import Grower
from growlab.grower.network import no_widths, renew, trace_for_growth

__all__ = ["Forecast", "Grower", "no_widths", "renew", "trace_for_growth"]
