"""Parts: features beside growing, each of its own and none known to the engine."""

from growlab.parts.averages import Averages
from growlab.parts.part import Part

__all__ = ["Averages", "Part"]
