"""Parts: features beside growing, each of its own and none known to the engine."""

from growlab.parts.averages import Averages
from growlab.parts.classes import Classes
from growlab.parts.depth import Deepening
from growlab.parts.osgd import OldGradient
from growlab.parts.part import Part

__all__ = ["Averages", "Classes", "Deepening", "OldGradient", "Part"]
