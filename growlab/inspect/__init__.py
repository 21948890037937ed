"""Report which parts of a network can grow and how exactly, for one network or for whole libraries."""

from growlab.inspect.examine import METHODS, USUAL, Report, examine
from growlab.inspect.matrix import matrix, matrix_table
from growlab.inspect.sources import expand, load

__all__ = ["METHODS", "USUAL", "Report", "examine", "expand", "load", "matrix", "matrix_table"]
